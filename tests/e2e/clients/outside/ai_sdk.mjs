// The AI SDK's MCP client.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { serve } from "./driver.mjs";

const [url, key, modules] = process.argv.slice(2);
const file = createRequire(`${modules}/index.js`).resolve("@ai-sdk/mcp");
const { createMCPClient } = await import(pathToFileURL(file));

const headers = { Authorization: `Bearer ${key}` };
const client = await createMCPClient({ transport: { type: "http", url, headers } });
const tools = await client.tools();
await serve(
  async () => Object.keys(tools),
  (name, args, { signal }) =>
    tools[name].execute(args, { toolCallId: "use-1", messages: [], abortSignal: signal }),
);
