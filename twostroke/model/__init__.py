"""What is computed: a model as data, and the one pass over its layers.

arch.py           `Arch`: layers, shapes, positions, windows; products, FLOPs and cache entries follow from it
families.py       from config.json to an `Arch`, a function for each family; families_gguf.py: from GGUF metadata
document.py       an `Arch` as plain data, and back
fields.py         values of such files, read without trusting them
names.py          our parameter names, and where each lies in a checkpoint
latent.py         latent attention: its description and its layer
rope.py           rotary frequencies with every kind of scaling
layers.py         a loaded layer: a mixer and a feed with their weights
transformer.py    the forward pass
"""
