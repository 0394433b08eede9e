"""What a step, a request and a deployment cost: predicted, not measured. Nothing here imports torch.

    model/       seconds of one step, from bytes, FLOPs and a machine's rates
    simulation/  the engine's own scheduler on virtual time, with steps that take what model/ predicts
    answers/     what to do: a diagnosis of a slow deployment, the size of a planned one

Imports point from answers to simulation to model. `units.py` formats numbers for people.
"""
