// List, search, load and call with the second generation of the TypeScript SDK.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, key, modules] = process.argv.slice(2);
const file = createRequire(`${modules}/index.js`).resolve("@modelcontextprotocol/client");
const { Client, StreamableHTTPClientTransport } = await import(pathToFileURL(file));

const headers = { Authorization: `Bearer ${key}` };
const client = new Client({ name: "client-2", version: "1" }, { versionNegotiation: { mode: "auto" } });
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));
const call = async (name, args) => client.callTool({ name, arguments: args });
const { tools } = await client.listTools();
const found = await call("search_tools", { query: "weather forecast" });
const chosen = { group_id: "mcp:weather", tool_names: ["get_forecast"] };
const loaded = await call("load_tools", chosen);
const tool = { name: "weather__get_forecast", arguments: { city: "Oslo" } };
const result = await call("deferred_tool_call", tool);
const report = {
  version: client.getNegotiatedProtocolVersion(),
  tools: tools.map((each) => each.name),
  found: found.content[0].text.includes("weather__get_forecast"),
  loaded: JSON.parse(loaded.content[0].text).tool_names,
  answer: result.structuredContent,
};
await client.close();
process.stdout.write(JSON.stringify(report));
