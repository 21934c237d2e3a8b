// Questions to the server: the token, waiting while it is busy, and errors in words.

const KEY = "vitlab-token";
const MOST_TRIES = 12; // of a question that the server is too busy for
const LONGEST_WAIT_S = 30;

export class Problem extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

const storage = () => { try { return window.sessionStorage; } catch { return null; } }; // some browsers forbid it
let token = storage()?.getItem(KEY) ?? "";
let askedFor = null; // one dialog, however many questions wait for it

// `listeners.token(wrong)` gives what the reader typed; `listeners.busy(seconds)` is told of every wait, and of its end by 0.
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
    throw new Problem("unreachable", "The server cannot be reached, or it has cut the connection. Is it still running?");
  }
};

// The JSON that the server answers; `body` is a file, sent as it is.
export const ask = async (path, { query = {}, body = null, signal } = {}) => {
  for (let tries = 1; ; tries++) {
    const used = token;
    const response = await send(address(path, query), body, used, signal);
    if (response.status === 401) { await newToken(used); continue; }
    if (response.status === 503 && tries < MOST_TRIES) {
      const seconds = Math.min(LONGEST_WAIT_S, Math.max(1, Number(response.headers.get("Retry-After")) || 1));
      listeners.busy(seconds);
      // Not all at once: those who were sent away together would come back together.
      await sleep(1000 * seconds * (1 + Math.random() / 4), signal).finally(() => listeners.busy(0));
      continue;
    }
    const answer = await response.json().catch(() => null);
    if (response.ok && answer) return answer;
    const told = answer?.error;
    throw new Problem(told?.code ?? "unknown", told?.message ?? `The server answered with status ${response.status}.`);
  }
};
