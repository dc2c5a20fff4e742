// Runs one script in Deno, without any permission. Started by typescript_engine.py.
//
// Standard input: one line with the program, then one line with answers for each line with calls.
// Standard output: {"ready": true}, then {"calls": […]}, {"logs": "…"}, and at the end
// {"returned": …}, {"cut": …} or {"failed": …}, a line each.
//
// The order of everything is the same in every run: calls are announced together when the script
// can do nothing else, sleeping takes no time, and clock and random numbers follow from the
// program. So a script can be ended, and run again up to the same point. The script shares this
// realm, may change what it finds here and may write such lines itself: the parent trusts none.

const {
  Array, Deno: deno, Error, JSON: { parse, stringify }, Map, Object, Promise, Proxy, Reflect, Set,
  String, TypeError, Uint8Array, Date: RealDate, setImmediate: nextTurn,
} = globalThis;
const MAX_LOGS = 32_000; // characters of a line with logs
const MAX_RETURNED = 100_000; // characters of a result; of a longer one, the beginning is returned
const MAX_TEXT = 8_000; // characters of an error
const IDLE_TURNS = 10; // of the event loop; a timer of 0 would take two milliseconds
const encoder = new TextEncoder(), decoder = new TextDecoder();

// --- Lines --------------------------------------------------------------------------------------

function write(line) {
  let data = encoder.encode(line + "\n");
  while (data.length > 0) data = data.subarray(deno.stdout.writeSync(data));
}

function readLine() {
  const chunk = new Uint8Array(65_536);
  let text = "";
  for (;;) {
    const size = deno.stdin.readSync(chunk);
    if (size === null) deno.exit(1);
    text += decoder.decode(chunk.subarray(0, size), { stream: true });
    if (chunk[size - 1] === 10) return parse(text); // the parent sends no line unasked
  }
}

let logs = "";

function flush() {
  const text = logs;
  logs = "";
  for (let at = 0; at < text.length; at += MAX_LOGS) {
    write(stringify({ logs: text.slice(at, at + MAX_LOGS) }));
  }
}

function log(...values) {
  logs += values.map(shown).join(" ") + "\n";
  if (logs.length > MAX_LOGS) flush();
}

function shown(value) {
  if (typeof value === "string") return value;
  if (value instanceof Error) return `${value.name}: ${value.message}`;
  try {
    return toJson(value) ?? String(value);
  } catch {
    return String(value);
  }
}

/** Return a value as JSON; undefined for what JSON does not have. Throws for cycles. */
function toJson(value) {
  return stringify(value, (_, item) => {
    if (typeof item === "bigint") return String(item);
    if (item instanceof Map) return Object.fromEntries(item);
    if (item instanceof Set) return [...item];
    if (item instanceof Error) return `${item.name}: ${item.message}`; // of Promise.allSettled
    return item;
  });
}

// --- Calls --------------------------------------------------------------------------------------

class ToolError extends Error {}
class PermissionError extends Error {}
class TimeoutError extends Error {}
const KINDS = { RuntimeError: ToolError, PermissionError, TimeoutError };
for (const kind of [ToolError, PermissionError, TimeoutError]) kind.prototype.name = kind.name;
const TYPES = new Map([
  [String, "string"], [Number, "number"], [Boolean, "boolean"], [Array, "array"],
  [Object, "object"],
]);

const pending = new Map(); // calls by number, until they are answered
let announced = [], number = 0, isScheduled = false;

async function call(name, values) {
  const [given] = values;
  const isObject = typeof given === "object" && given !== null && !Array.isArray(given);
  if (values.length > 1 || (given !== undefined && !isObject)) {
    throw new TypeError(`${name} takes one object with its arguments.`);
  }
  return await announce(name, given ?? {});
}

async function extract(value, type) {
  return await announce("extract", { value: value ?? null, type: TYPES.get(type) ?? type ?? null });
}

function announce(name, given) {
  const text = toJson(given) ?? "{}";
  const site = {};
  Error.captureStackTrace(site, announce); // an answer comes without the lines of the script
  return new Promise((resolve, reject) => {
    number += 1;
    pending.set(number, { resolve, reject, site });
    announced.push(`{"number":${number},"name":${stringify(name)},"arguments":${text}}`);
    schedule();
  });
}

/** Run a function once the script can do nothing else: what it started natively is done, too. */
function whenIdle(run, turns = IDLE_TURNS) {
  nextTurn(() => (turns > 1 ? whenIdle(run, turns - 1) : run()));
}

/** Do what is next once the script can do nothing else: calls, or else the next timer. */
function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  whenIdle(() => {
    isScheduled = false;
    if (announced.length > 0) exchange();
    else fireTimer();
    if (announced.length > 0 || timers.length > 0) schedule();
  });
}

function exchange() {
  flush();
  const calls = announced;
  announced = [];
  write(`{"calls":[${calls.join(",")}]}`);
  for (const answer of readLine()) {
    const { resolve, reject, site } = pending.get(answer.number);
    pending.delete(answer.number);
    if (answer.error) reject(errorAt(site, answer.error));
    else resolve(answer.value);
  }
}

function errorAt(site, { kind, message }) {
  const error = new KINDS[kind](message);
  const [, ...frames] = String(site.stack).split("\n");
  const stack = [`${error.name}: ${message}`, ...frames].join("\n");
  Object.defineProperty(error, "stack", { value: stack, configurable: true, writable: true });
  return error;
}

// --- Clock, timers and random numbers -----------------------------------------------------------

let now = 0, timers = [], timer = 0;

function addTimer(run, delay, isRepeated, values) {
  if (typeof run !== "function") throw new TypeError("A timer takes a function.");
  const after = Math.max(0, Number(delay) || 0);
  timer += 1;
  const every = isRepeated ? Math.max(1, after) : 0;
  timers.push({ id: timer, at: now + after, run, values, every });
  schedule();
  return timer;
}

function fireTimer() {
  if (timers.length === 0) return;
  const next = timers.reduce((first, one) => (one.at < first.at ? one : first));
  timers = timers.filter((one) => one !== next);
  now = Math.max(now, next.at);
  if (next.every) timers.push({ ...next, at: now + next.every });
  next.run(...next.values);
}

function clear(id) {
  timers = timers.filter((one) => one.id !== id);
}

let state = 1;

/** Return a number of 32 bits: xorshift, seeded by the program. */
function random() {
  state ^= state << 13;
  state ^= state >>> 17;
  state ^= state << 5;
  return state >>> 0;
}

function fill(array) {
  const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = random();
  return array;
}

function uuid() {
  const bytes = fill(new Uint8Array(16));
  bytes[6] = (bytes[6] & 15) | 64;
  bytes[8] = (bytes[8] & 63) | 128;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

const fixedDate = function Date(...values) {
  if (!new.target) return new RealDate(now).toString();
  return Reflect.construct(RealDate, values.length > 0 ? values : [now], new.target);
};
fixedDate.prototype = RealDate.prototype;
fixedDate.prototype.constructor = fixedDate;
Object.assign(fixedDate, { now: () => now, parse: RealDate.parse, UTC: RealDate.UTC });

// --- What a script has --------------------------------------------------------------------------

// What needs a permission, tells the time, or differs from run to run. A script that gets hold of
// it elsewhere has no permission there either.
const REMOVED = [
  "Atomics", "BroadcastChannel", "Deno", "EventSource", "FileReader", "FinalizationRegistry",
  "SharedArrayBuffer", "Temporal", "WeakRef", "WebSocket", "Worker", "alert", "caches", "confirm",
  "fetch", "localStorage", "navigator", "process", "prompt", "sessionStorage",
];
const PRINTS = ["debug", "dir", "error", "group", "info", "log", "table", "trace", "warn"];
const IGNORED = ["clear", "count", "groupEnd", "time", "timeEnd", "timeLog"];

function prepare(program) {
  const origin = now = program.now;
  state = program.seed | 1;
  for (const name of REMOVED) delete globalThis[name];
  Math.random = () => random() / 2 ** 32;
  Object.assign(globalThis, {
    Date: fixedDate,
    PermissionError,
    TimeoutError,
    ToolError,
    clearImmediate: clear,
    clearInterval: clear,
    clearTimeout: clear,
    console: {
      ...Object.fromEntries(PRINTS.map((name) => [name, log])),
      ...Object.fromEntries(IGNORED.map((name) => [name, () => {}])),
      assert: (is, ...values) => is || log("Assertion failed:", ...values),
    },
    crypto: { getRandomValues: fill, randomUUID: uuid },
    extract,
    input: program.input,
    performance: { now: () => now - origin, timeOrigin: origin },
    setImmediate: (run, ...values) => addTimer(run, 0, false, values),
    setInterval: (run, delay, ...values) => addTimer(run, delay, true, values),
    setTimeout: (run, delay, ...values) => addTimer(run, delay, false, values),
  });
  for (const [module, functions] of Object.entries(program.modules)) {
    const tools = {};
    for (const name of functions) tools[name] = (...values) => call(`${module}.${name}`, values);
    globalThis[module] = new Proxy(Object.freeze(tools), { get: findTool(module) });
  }
}

function findTool(module) {
  return (tools, name) => {
    if (typeof name === "symbol" || name === "then" || Object.hasOwn(tools, name)) {
      return tools[name];
    }
    return (...values) => call(`${module}.${name}`, values); // refused by its name
  };
}

// --- Run ----------------------------------------------------------------------------------------

const SCRIPT = /data:application\/typescript;base64,[\w+/=.]*/g; // Deno shortens it
const LINE = /script\.ts:(\d+):\d+/;
const NO_MODULES = "Modules of Node.js are not available to scripts.";
const MODULE = /^\s+at .*(ext:|node:)/;
const INTERNAL = /^\s+at .*(data:application\/javascript|ext:|node:)/;

function end(line) {
  flush();
  write(line);
  deno.exit(0);
}

function fail(error) {
  const isError = error instanceof Error;
  let said = String(isError ? error.message : shown(error)).replace(SCRIPT, "script.ts");
  if (/^(ReferenceError: )+Deno is not defined\n\s+at .*(ext:|node:)/.test(said)) said = NO_MODULES;
  const syntax = /^SyntaxError: (.*)$/m.exec(said); // the lines after it quote our function, too
  const stack = String((isError && error.stack) || "").replace(SCRIPT, "script.ts");
  const frames = stack.split("\n").filter((line) => !INTERNAL.test(line));
  const found = LINE.exec(syntax ? said : stack);
  const failed = {
    kind: syntax ? "SyntaxError" : String(isError ? error.name : "Error").slice(0, 80),
    message: (syntax ? syntax[1] : said).slice(0, MAX_TEXT),
    line: found ? Number(found[1]) : null,
    traceback: (syntax ? "" : frames.join("\n")).slice(0, MAX_TEXT),
  };
  end(stringify({ failed }));
}

/** Make the calls that the script did not wait for, and report their errors; then end. */
function finish(value) {
  whenIdle(() => (announced.length > 0 ? finish(value) : giveBack(value)));
}

function giveBack(value) {
  let text = "null";
  try {
    text = toJson(value) ?? text;
  } catch (error) {
    fail(error);
  }
  if (text.length <= MAX_RETURNED) end(`{"returned":${text}}`);
  const start = text.slice(0, MAX_RETURNED / 2);
  end(stringify({ cut: { bytes: encoder.encode(text).length, start } }));
}

function run({ code }) {
  // A function around it permits `return`; the first line stays the first.
  const module = encoder.encode(`export default async () => {${code}\n}`).toBase64();
  const script = import(`data:application/typescript;base64,${module}`);
  // Not awaited: without anything left to wait for, Deno ends with the event below.
  script.then(({ default: main }) => main()).then(finish, fail);
}

addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  const [, frame] = String(event.reason?.stack).split("\n");
  // A module of Node.js that fails rejects twice: the script's import, and one of Deno's own.
  if (!MODULE.test(frame)) fail(event.reason);
});
addEventListener("error", (event) => {
  event.preventDefault();
  fail(event.error);
});
addEventListener("beforeunload", () => {
  fail(new Error("The script waits for something that cannot happen."));
});
write('{"ready":true}');
const program = readLine();
prepare(program);
run(program);
