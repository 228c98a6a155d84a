// Use a JavaScript client of OpenAI's API as its documentation shows, and print how each use went.
//
//     node tests/interop/use_clients.mjs NAME http://127.0.0.1:8000/v1 MODEL FOLDER
//
// FOLDER holds the node_modules with the client. Answers that must have a form have few possible values, so that the
// smallest model finishes them.

import assert from "node:assert";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [name, url, model, folder] = process.argv.slice(2);
const require = createRequire(resolve(folder, "package.json"));
const load = async (library) => await import(pathToFileURL(require.resolve(library)).href);
const prompt = "What is the weather in Paris?";
const short = 24; // tokens of an answer without a form
const city = { city: { enum: ["Paris", "Rome"] } };
const schema = { type: "object", properties: city, required: ["city"], additionalProperties: false };
const weather = { name: "weather", description: "The weather in a city.", parameters: schema };

async function openai() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const chat = { model, messages: [{ role: "user", content: prompt }], max_tokens: short };
  const tools = [{ type: "function", function: weather }];
  return {
    models: async () => assert((await client.models.list()).data.length),
    chat: async () => assert((await client.chat.completions.create(chat)).choices[0].message.content),
    "chat, streamed": async () => {
      let text = "";
      for await (const chunk of await client.chat.completions.create({ ...chat, stream: true }))
        text += chunk.choices[0]?.delta?.content ?? "";
      assert(text);
    },
    "chat, tool required": async () => {
      const body = { ...chat, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 100 };
      const call = (await client.chat.completions.create(body)).choices[0].message.tool_calls[0];
      assert(JSON.parse(call.function.arguments).city);
    },
    response: async () =>
      assert((await client.responses.create({ model, input: prompt, max_output_tokens: short })).output_text),
    "response, tool streamed": async () => {
      const stream = client.responses.stream({
        model, input: prompt, tools: [{ type: "function", ...weather, strict: false }], tool_choice: "required",
      });
      const final = await stream.finalResponse();
      assert(JSON.parse(final.output.find((item) => item.type === "function_call").arguments).city);
    },
  };
}

async function aiSdk() {
  const { generateText, streamText, Output, tool, stepCountIs, jsonSchema } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const { createOpenAI } = await load("@ai-sdk/openai");
  const own = createOpenAI({ baseURL: url, apiKey: "none" });
  const compatible = createOpenAICompatible({ name: "own", baseURL: url, supportsStructuredOutputs: true });
  const models = { compatible: compatible(model), "openai, responses": own(model), "openai, chat": own.chat(model) };
  const cat = jsonSchema({
    type: "object",
    properties: { colour: { enum: ["black", "white"] }, old: { type: "boolean" } },
    required: ["colour", "old"],
    additionalProperties: false,
  });
  const tools = {
    weather: tool({ description: weather.description, inputSchema: jsonSchema(schema), execute: () => "sunny" }),
  };
  const named = { type: "tool", toolName: "weather" };
  const uses = {};
  for (const [kind, chat] of Object.entries(models)) {
    const shared = { model: chat, prompt, maxRetries: 0, maxOutputTokens: short };
    uses[`${kind}: generateText`] = async () => assert((await generateText(shared)).text);
    uses[`${kind}: streamText`] = async () => {
      const answer = streamText({ ...shared, onError: ({ error }) => { throw error; } });
      let text = "";
      for await (const piece of answer.textStream) text += piece;
      assert(text);
    };
    uses[`${kind}: object`] = async () => {
      const output = Output.object({ schema: cat });
      assert((await generateText({ ...shared, maxOutputTokens: 100, output })).output.colour);
    };
    uses[`${kind}: tool required`] = async () => {
      // A small model may call the tool again and again; a call that is cut off has no result.
      const given = { ...shared, maxOutputTokens: 400, tools, toolChoice: "required" };
      assert((await generateText(given)).toolResults[0].output);
    };
    uses[`${kind}: tool required, streamed`] = async () => {
      const answer = streamText({ ...shared, maxOutputTokens: 100, tools, toolChoice: named });
      assert((await answer.toolResults)[0].output);
    };
    uses[`${kind}: tool, its result`] = async () => {
      const first = { prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : named }) };
      const given = { ...shared, maxOutputTokens: 100, tools, stopWhen: stepCountIs(2), ...first };
      assert.equal((await generateText(given)).steps.length, 2);
    };
  }
  return uses;
}

const uses = await { "openai (Node)": openai, "Vercel's AI SDK": aiSdk }[name]();
let failed = false;
for (const [what, use] of Object.entries(uses)) {
  try {
    await use();
    console.log(`ok ${what}`);
  } catch (error) {
    failed = true;
    console.error(error);
    const said = `${error.name}: ${error.message} ${error.responseBody ?? ""}`;
    console.log(`FAIL ${what}: ${said.replace(/\s+/g, " ").slice(0, 300)}`);
  }
}
process.exit(failed ? 1 : 0);
