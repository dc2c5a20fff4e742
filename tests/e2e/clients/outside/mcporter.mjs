// mcporter's runtime, which its command line uses, too.
import { pathToFileURL } from "node:url";
import { serve } from "./driver.mjs";

const [url, key, modules] = process.argv.slice(2);
const entry = pathToFileURL(`${modules}/mcporter/dist/index.js`);
const { createRuntime } = await import(entry);

const headers = { Authorization: `Bearer ${key}` };
const silent = { info() {}, warn() {}, error: console.error, debug() {} };
const runtime = await createRuntime({
  servers: [{ name: "toolcrib", command: { kind: "http", url: new URL(url), headers } }],
  logger: silent,
});
await serve(
  async () => (await runtime.listTools("toolcrib")).map((tool) => tool.name),
  (name, args) => runtime.callTool("toolcrib", name, { args }),
);
