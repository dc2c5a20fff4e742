// mcp-remote: a program for clients that only start programs, here the TypeScript SDK.
import { createRequire } from "node:module";
import { serve } from "./driver.mjs";

const [url, key, modules] = process.argv.slice(2);
const require = createRequire(`${modules}/index.js`);
const { Client } = require("sdk-1/client/index.js");
const { StdioClientTransport } = require("sdk-1/client/stdio.js");

// As in the snippet for Claude Desktop, whose npx would install the newest version.
const program = `${modules}/mcp-remote/dist/proxy.js`;
const header = "Authorization:${TOOLCRIB_AUTHORIZATION}";
const transport = new StdioClientTransport({
  command: process.execPath,
  args: [program, url, "--header", header, "--allow-http"],
  env: { ...process.env, TOOLCRIB_AUTHORIZATION: `Bearer ${key}` },
});
const client = new Client({ name: "mcp-remote test", version: "1" });
await client.connect(transport);
await serve(
  async () => (await client.listTools()).tools.map((tool) => tool.name),
  (name, args, { signal, count }) =>
    client.callTool({ name, arguments: args }, undefined, { signal, onprogress: count }),
);
