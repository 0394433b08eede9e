import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import path from "node:path";

const here = createRequire(path.join(process.env.TWOSTROKE_NODE, "index.js"));
const { default: OpenAI } = await import(here.resolve("openai"));
const { TWOSTROKE_URL: url, TWOSTROKE_KEY: apiKey, TWOSTROKE_MODEL: model } = process.env;
const ran = [];
const check = (what, good) => {
  if (!good) throw new Error(what);
  ran.push(what);
};
const client = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const common = { model, messages, max_completion_tokens: 30, temperature: 0 };
const whole = await client.chat.completions.create(common);
check("chat", whole.choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
check("stream", text === whole.choices[0].message.content);
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Weather of a city.", parameters } }];
const question = [{ role: "user", content: "What is the weather in Paris? Use the tool." }];
const called = await client.chat.completions.create({ ...common, messages: question, tools, tool_choice: "required" });
check("tools", called.choices[0].message.tool_calls[0].function.name === "get_weather");
const runner = client.chat.completions.runTools({
  ...common,
  max_completion_tokens: 400,
  temperature: undefined,
  messages: question,
  tools: [
    {
      type: "function",
      function: { name: "get_weather", parameters, parse: JSON.parse, function: ({ city }) => `Sunny in ${city}.` },
    },
  ],
});
check("runTools", (await runner.finalChatCompletion()).choices.length === 1);
const answer = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 20, store: true });
check("responses", answer.output_text);
check("completions", (await client.completions.create({ model, prompt: "Once", max_tokens: 5 })).choices[0].text);
check("request id", whole._request_id);
const about = path.join(process.env.TWOSTROKE_NODE, "node_modules", "openai", "package.json");
console.log(JSON.stringify({ version: JSON.parse(readFileSync(about)).version, ran }));
