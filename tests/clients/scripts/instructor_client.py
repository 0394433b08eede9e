import anthropic
import instructor
import openai
from common import KEY, MODEL, URL, V1, ran, report
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


ask = [{"role": "user", "content": "Ann is 33 years old. Extract the person."}]
client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=300)
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    typed = instructor.from_openai(client, mode=mode)
    found = typed.chat.completions.create(
        model=MODEL, messages=ask, response_model=Person, max_tokens=400, temperature=0, max_retries=2
    )
    ran(mode.name, isinstance(found, Person))
several = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
    model=MODEL, messages=ask, response_model=Person, max_tokens=400, temperature=0
)
ran("partial", list(several)[-1].name is not None)
claude = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300))
found = claude.messages.create(model=MODEL, messages=ask, response_model=Person, max_tokens=400)
ran("from_anthropic", isinstance(found, Person))
report("instructor")
