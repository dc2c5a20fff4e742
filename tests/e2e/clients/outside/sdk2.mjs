// The second generation of the TypeScript SDK.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { serve } from "./driver.mjs";

const [url, key, modules] = process.argv.slice(2);
const file = createRequire(`${modules}/index.js`).resolve("@modelcontextprotocol/client");
const { Client, StreamableHTTPClientTransport } = await import(pathToFileURL(file));

const headers = { Authorization: `Bearer ${key}` };
const client = new Client({ name: "sdk-2", version: "1" }, { versionNegotiation: { mode: "auto" } });
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));
await serve(
  async () => (await client.listTools()).tools.map((tool) => tool.name),
  (name, args, { signal, count }) =>
    client.callTool({ name, arguments: args }, { signal, onprogress: count }),
);
