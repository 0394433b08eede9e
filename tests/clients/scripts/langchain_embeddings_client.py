"""OpenAIEmbeddings sends lists of texts, and the numbers come back in base64. Token ids of OpenAI's own tokenizer would
mean other texts to another model, so the client is told not to make them, as its documentation asks."""

from common import KEY, MODEL, V1, ran, report
from langchain_openai import OpenAIEmbeddings

vectors = OpenAIEmbeddings(
    model=MODEL, base_url=V1, api_key=KEY, check_embedding_ctx_length=False, max_retries=0, timeout=300
)
texts = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Shares fell on Monday."]
found = vectors.embed_documents(texts)
ran("embed_documents", len(found) == 3 and len(found[0]) == 384)


def near(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


ran("similar texts are near", near(found[0], found[1]) > 0.8 > near(found[0], found[2]))
ran("embed_query", near(vectors.embed_query(texts[0]), found[0]) > 0.99999)
short = OpenAIEmbeddings(
    model=MODEL, base_url=V1, api_key=KEY, check_embedding_ctx_length=False, dimensions=64, chunk_size=2, max_retries=0
)
ran("dimensions and chunks", [len(one) for one in short.embed_documents(texts)] == [64, 64, 64])
report("langchain-openai")
