// The first generation of the TypeScript SDK.
import { createRequire } from "node:module";
import { serve } from "./driver.mjs";

const [url, key, modules] = process.argv.slice(2);
const require = createRequire(`${modules}/index.js`);
const { Client } = require("sdk-1/client/index.js");
const { StreamableHTTPClientTransport } = require("sdk-1/client/streamableHttp.js");

const headers = { Authorization: `Bearer ${key}` };
const client = new Client({ name: "sdk-1", version: "1" });
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));
await serve(
  async () => (await client.listTools()).tools.map((tool) => tool.name),
  (name, args, { signal, count }) =>
    client.callTool({ name, arguments: args }, undefined, { signal, onprogress: count }),
);
