import dspy
from common import KEY, MODEL, V1, ran, report

lm = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, max_tokens=300, temperature=0.0, cache=False, num_retries=0)
ran("LM", lm("Say hello.")[0])
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
ran("Predict, JSONAdapter", dspy.Predict("question -> answer")(question="What is the capital of France?").answer)
ran(
    "ChainOfThought",
    dspy.ChainOfThought("question -> answer: int")(question="What is one plus one?").answer is not None,
)
report("dspy")
