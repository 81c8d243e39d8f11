// client.mjs BASE_URL...: what OpenAI's Node client makes of the API at each BASE_URL.
//
// It asks each in turn for a streamed chat completion, without retries, and prints JSON,
// an object a line: {"client": ...} in the beginning, {"piece": ...} for each piece of
// text, {"outcome": ...} at the end of each answer.

import OpenAI from "openai";
import { VERSION } from "openai/version";

const say = (line) => console.log(JSON.stringify(line));

function classes(e) {
  const names = [];
  for (let p = Object.getPrototypeOf(e); p !== Object.prototype; p = Object.getPrototypeOf(p)) names.push(p.constructor.name);
  return names;
}

function outcome(e, text) {
  if (e === undefined) return { text };
  return {
    text,
    raised: classes(e),
    apiError: e instanceof OpenAI.APIError,
    cause: e.cause?.constructor.name,
    message: e.message,
    type: e.type,
    code: e.code,
    status: e.status,
    body: e.error,
  };
}

say({ client: `openai ${VERSION}, Node ${process.versions.node}` });
for (const baseURL of process.argv.slice(2)) {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 30_000 });
  let text = "";
  let raised;
  try {
    const stream = await client.chat.completions.create({
      model: "model",
      messages: [{ role: "user", content: "Hello." }],
      stream: true,
    });
    for await (const chunk of stream) {
      const piece = chunk.choices[0].delta.content;
      text += piece;
      say({ piece });
    }
  } catch (e) {
    raised = e;
  }
  say({ outcome: outcome(raised, text) });
}
