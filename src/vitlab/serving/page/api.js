// Questions to the server: the token, waiting while it is busy, and errors in words.

const KEY = "vitlab-token";
const MOST_WAIT_MS = 300_000; // that a question waits for a server that is too busy
const LONGEST_PAUSE_S = 30;

// `passing`: whether the same question may be answered later. `pause`: the seconds until then, from a server that is busy.
export class Problem extends Error {
  constructor(code, message, passing = false, pause = 0) {
    super(message);
    Object.assign(this, { code, passing, pause });
  }
}

const storage = () => { try { return window.sessionStorage; } catch { return null; } }; // some browsers forbid it
let token = storage()?.getItem(KEY) ?? "";
let askedFor = null; // one dialog, however many questions wait for it

// `listeners.token(wrong)` gives what the reader typed; `listeners.busy(seconds)` hears of every pause.
export const listeners = { token: async () => "", busy: () => {} };

export const hasToken = () => token !== "";

const newToken = (refused) => {
  if (token !== refused) return Promise.resolve(); // another question has got one in the meantime
  askedFor ??= listeners.token(refused !== "").then((given) => {
    token = given;
    storage()?.setItem(KEY, given);
    askedFor = null;
  });
  return askedFor;
};

const sleep = (ms, signal) => new Promise((done, stop) => {
  const timer = setTimeout(done, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); stop(signal.reason); }, { once: true });
});

const address = (path, query) => {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
};

const send = async (path, body, used, signal) => {
  const headers = { Accept: "application/json" };
  if (used) headers.Authorization = `Bearer ${used}`;
  if (body) headers["Content-Type"] = body.type.startsWith("image/") ? body.type : "application/octet-stream";
  try {
    return await fetch(path, { method: body ? "POST" : "GET", headers, body, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem("unreachable", "The server cannot be reached, or it has cut the connection. Is it still running?", true);
  }
};

// The JSON that the server answers; `body` is a file, sent as it is.
export const ask = async (path, { query = {}, body = null, signal } = {}) => {
  for (;;) {
    const used = token;
    const response = await send(address(path, query), body, used, signal);
    if (response.status === 401) {
      await newToken(used);
      if (token === used) throw new Problem("no_token", "This server wants a token. Reload the page to enter it.", false);
      continue;
    }
    const answer = await response.json().catch(() => null), problem = answer?.error;
    if (response.ok && answer) return answer;
    const pause = response.status === 503 ? Math.min(LONGEST_PAUSE_S, Math.max(1, Number(response.headers.get("Retry-After")) || 1)) : 0;
    throw new Problem(problem?.code ?? "unknown", problem?.message ?? `The server answered with status ${response.status}.`, response.status >= 500, pause);
  }
};

// The same, again and again while the server is busy.
export const askPatiently = async (path, options) => {
  const since = performance.now();
  for (;;) {
    try {
      return await ask(path, options);
    } catch (error) {
      if (!error.pause || isTooLong(since)) throw error;
      listeners.busy(error.pause);
      await sleep(1000 * error.pause, options?.signal);
    }
  }
};

export const isTooLong = (since) => performance.now() - since > MOST_WAIT_MS;
