// Stay connected with the first generation of the TypeScript SDK, and call when told to.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";

const [url, key, modules] = process.argv.slice(2);
const require = createRequire(`${modules}/index.js`);
const { Client } = require("sdk-1/client/index.js");
const { StreamableHTTPClientTransport } = require("sdk-1/client/streamableHttp.js");

const report = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
const headers = { Authorization: `Bearer ${key}` };
const client = new Client({ name: "restart", version: "1" });
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));
await client.callTool({
  name: "load_tools",
  arguments: { group_id: "mcp:weather", tool_names: ["get_forecast"] },
});
report("ready");
for await (const _ of createInterface({ input: process.stdin })) {
  const result = await client.callTool({
    name: "deferred_tool_call",
    arguments: { name: "weather__get_forecast", arguments: { city: "Oslo" } },
  });
  report(result.structuredContent);
}
process.exit(0);
