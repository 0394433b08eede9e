import { createRequire } from "node:module";
import path from "node:path";

const here = createRequire(path.join(process.env.TWOSTROKE_NODE, "index.js"));
const load = (name) => import(here.resolve(name));
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");
const { TWOSTROKE_URL: url, TWOSTROKE_KEY: apiKey, TWOSTROKE_MODEL: name } = process.env;
const ran = [];
const check = (what, good) => {
  if (!good) throw new Error(what);
  ran.push(what);
};
const baseURL = url + "/v1";
const models = {
  responses: createOpenAI({ baseURL, apiKey })(name),
  chat: createOpenAI({ baseURL, apiKey }).chat(name),
  compatible: createOpenAICompatible({ name: "twostroke", baseURL, apiKey, supportsStructuredOutputs: true })(name),
  anthropic: createAnthropic({ baseURL, apiKey })(name),
};
const weather = tool({
  description: "The weather in a city now.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Sunny in ${city}.`,
});
const limits = { maxOutputTokens: 100, maxRetries: 0, temperature: 0 };
for (const [kind, model] of Object.entries(models)) {
  const whole = await generateText({ model, prompt: "Say hello.", ...limits });
  check(`${kind} generateText`, whole.text);
  const stream = streamText({ model, prompt: "Say hello.", ...limits });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  check(`${kind} streamText`, text === whole.text);
  const schema = z.object({ name: z.string(), age: z.number().int() });
  const made = await generateObject({ model, schema, prompt: "Ann is 33 years old.", ...limits });
  check(`${kind} generateObject`, made.object.name !== undefined);
  const called = await generateText({
    model, prompt: "What is the weather in Paris?", tools: { weather }, toolChoice: "required", ...limits,
  });
  check(`${kind} tools`, called.toolCalls[0].toolName === "weather");
  const loop = await generateText({
    model, prompt: "What is the weather in Paris?", tools: { weather }, stopWhen: stepCountIs(3), ...limits,
  });
  check(`${kind} tool loop`, loop.steps.length > 0);
}
console.log(JSON.stringify({ version: here("ai/package.json").version, ran }));
