// Let a test drive a client program, as driver.py does; `call` also gets a signal and a callback.
import { createInterface } from "node:readline";

const report = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);

export const serve = async (listTools, callTool) => {
  report("ready");
  const running = new Map();
  const answer = async (command) => {
    const controller = new AbortController();
    running.set(command.id, controller);
    let steps = 0;
    let body;
    try {
      if (command.do === "list") body = { tools: await listTools() };
      else {
        const count = () => { steps += 1; };
        const options = { signal: controller.signal, count };
        body = { result: await callTool(command.name, command.arguments ?? {}, options) };
      }
    } catch (error) {
      body = controller.signal.aborted ? { cancelled: true } : { failure: String(error) };
    }
    report({ id: command.id, steps, ...body });
  };
  for await (const line of createInterface({ input: process.stdin })) {
    const command = JSON.parse(line);
    if (command.do === "cancel") running.get(command.id).abort();
    else answer(command);
  }
  process.exit(0);
};
