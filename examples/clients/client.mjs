// Talk to a SparseK server with OpenAI's Node client: stream, ask about a document, call a tool.
//
//   npm install openai        (Node 22 or later)
//   node client.mjs --url http://127.0.0.1:8000 --document report.txt
import { readFile } from "node:fs/promises";
import { basename } from "node:path";
import { parseArgs } from "node:util";
import OpenAI from "openai";

const { url, document } = parseArgs({
  options: { url: { type: "string", default: "http://127.0.0.1:8000" }, document: { type: "string" } },
}).values;
const base = url.replace(/\/?(v1\/?)?$/, ""); // /v1 may follow
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", timeout: 600_000 });
const model = (await models()).data[0].id;

async function models() {
  try {
    return await client.models.list();
  } catch (error) {
    if (!(error instanceof OpenAI.APIConnectionError) && error.status !== 404) throw error;
    console.error(`error: no server answers at ${url}: start one`);
    process.exit(1);
  }
}

async function stream(question) {
  const chunks = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: question }],
    max_tokens: 48,
    temperature: 0,
    stream: true,
  });
  for await (const chunk of chunks) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
  console.log();
}

// The server needs --enable-auto-tool-choice --tool-call-parser hermes (or your model's parser).
async function callTool() {
  const answer = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "The weather of a city",
          parameters: {
            type: "object",
            properties: { city: { type: "string" } },
            required: ["city"],
            additionalProperties: false,
          },
        },
      },
    ],
    tool_choice: { type: "function", function: { name: "get_weather" } },
    max_tokens: 48,
    temperature: 0,
  });
  return JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
}

async function refusedEmbeddings() {
  try {
    await client.embeddings.create({ model, input: "a text" });
    return 200;
  } catch (error) {
    if (error instanceof OpenAI.APIError) return error.status;
    throw error;
  }
}

console.log(`==> ${model}, streamed`);
await stream("What is the capital of France?");
if (document) {
  console.log(`==> about ${basename(document)}`);
  const text = await readFile(document, "utf8");
  try {
    await stream(`${text}\n\nSummarise the document above in one sentence.`);
  } catch (error) {
    if (!(error instanceof OpenAI.BadRequestError)) throw error;
    console.log(`==> document: refused (${error.message})`); // longer than the server's context
  }
}
try {
  console.log(`==> tool: get_weather(${JSON.stringify(await callTool())})`);
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  console.log(`==> tool: refused (${error.message})`);
}
console.log(`==> embeddings: status ${await refusedEmbeddings()}, as for any chat model`);
