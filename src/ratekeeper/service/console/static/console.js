// What every page uses: times in the viewer's zone, confirmations, the CSRF header of htmx.

const shown = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

function localTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    if (!Number.isNaN(at.getTime())) element.textContent = shown.format(at);
  }
}

// Widths of bars and other styles that depend on data: <span data-width="42"> is 42 % wide.
function widths(root) {
  for (const element of root.querySelectorAll("[data-width]")) {
    element.style.width = `${Math.max(0, Math.min(100, Number(element.dataset.width)))}%`;
  }
}

export function refresh(root) {
  localTimes(root);
  widths(root);
}

refresh(document);
document.addEventListener("htmx:load", (event) => refresh(event.detail.elt.parentNode ?? document));

const csrf = document.querySelector('meta[name="csrf"]');
document.addEventListener("htmx:configRequest", (event) => {
  if (csrf) event.detail.headers["X-CSRF-Token"] = csrf.content;
});
// A rejected form is shown again with its problem; htmx would drop an answer with an error status.
// A part that the page asks for by itself, every few seconds, stays as it is instead.
document.addEventListener("htmx:beforeSwap", (event) => {
  const { status, responseText } = event.detail.xhr;
  if (status >= 400 && responseText) event.detail.shouldSwap = !isPoll(event);
});

function isPoll(event) {
  const { elt, triggeringEvent } = event.detail.requestConfig;
  return !triggeringEvent && elt.getAttribute("hx-trigger")?.startsWith("every ");
}

// The notice below the navigation. An empty text hides it.
export const LOST = "The live connection is lost. The page shows the last known state and reconnects.";
export function connection(text) {
  const notice = document.getElementById("connection");
  if (notice.textContent !== text) notice.textContent = text;
  notice.hidden = !text;
}

// A page in the background does not ask, and a page whose question fails says so.
document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && isPoll(event)) event.preventDefault();
});
// Without a session, htmx would leave the page for the log-in.
document.addEventListener("htmx:beforeOnLoad", (event) => {
  if (event.detail.xhr.status !== 401) return;
  event.preventDefault();
  ended();
});
document.addEventListener("htmx:afterRequest", (event) => {
  if (isPoll(event) && event.detail.xhr.status !== 401) connection(event.detail.successful ? "" : LOST);
});

// What an update must not undo: how far a table is scrolled.
const scrolled = new Map();
document.addEventListener("htmx:beforeSwap", () => keepScroll(document));
document.addEventListener("htmx:afterSwap", () => restoreScroll(document));
export function keepScroll(root) {
  scrolled.clear();
  for (const each of root.querySelectorAll(".scroll[id]")) scrolled.set(each.id, each.scrollLeft);
}
export function restoreScroll(root) {
  for (const each of root.querySelectorAll(".scroll[id]")) each.scrollLeft = scrolled.get(each.id) ?? 0;
}

// <button data-confirm="Reset the counts of user:42?"> asks before its form is sent.
const dialog = document.getElementById("confirm");
let confirmed = null;
// The form that may be sent now; see below.
let ready = null;
document.addEventListener(
  "submit",
  (event) => {
    const button = event.submitter;
    if (event.target === ready) return;
    if (!button?.dataset.confirm || confirmed === button) {
      confirmed = null;
      return;
    }
    event.preventDefault();
    event.stopImmediatePropagation();
    document.getElementById("confirm-text").textContent = button.dataset.confirm;
    dialog.returnValue = "";
    dialog.onclose = () => {
      if (dialog.returnValue !== "yes") return;
      confirmed = button;
      button.form.requestSubmit(button);
    };
    dialog.showModal();
  },
  true,
);

// A form is sent once, and only while the session lasts. Else the page stays, with all that was typed.
const SENDING_MS = 30000;
document.addEventListener("submit", async (event) => {
  const { target: form, submitter } = event;
  // Not `form.method`: a field may have that name.
  if (event.defaultPrevented || form.getAttribute("method") !== "post" || !csrf || form === ready) return;
  event.preventDefault();
  // A second click while the service answers would grant the units twice.
  if (form.ariaBusy === "true") return;
  form.ariaBusy = "true";
  if (await hasSession()) {
    ready = form;
    form.requestSubmit(submitter);
    ready = null;
    setTimeout(() => (form.ariaBusy = null), SENDING_MS);
  } else {
    form.ariaBusy = null;
  }
});
// The page as the browser kept it, after Back.
window.addEventListener("pageshow", () => {
  for (const form of document.querySelectorAll("form[aria-busy]")) form.ariaBusy = null;
});

// Asks whether the operator has a session. After a new log-in, the forms of this page belong to it.
async function hasSession() {
  try {
    const response = await fetch("/console/sessions", { cache: "no-store", headers: { "HX-Request": "true" } });
    if (response.status === 401) {
      ended();
      return false;
    }
    const now = new DOMParser().parseFromString(await response.text(), "text/html");
    const name = (page) => page.querySelector(".who")?.textContent;
    const fresh = now.querySelector('meta[name="csrf"]')?.content;
    if (fresh && name(now) === name(document)) {
      csrf.content = fresh;
      for (const field of document.querySelectorAll('input[name="csrf"]')) field.value = fresh;
    }
    connection("");
    return true;
  } catch {
    connection("The service does not answer, so nothing was sent. Try again.");
    return false;
  }
}

function ended() {
  const text = "Your session has ended. Nothing on this page is lost: log in again in another tab, then continue here. ";
  const notice = document.getElementById("connection");
  if (notice.textContent.startsWith(text)) return;
  connection(text);
  const link = document.createElement("a");
  link.href = `/console/login?${new URLSearchParams({ next: location.pathname + location.search })}`;
  link.target = "_blank";
  link.textContent = "Log in again";
  notice.append(link);
}

// The live stream of the console: server-sent events at `path`. `since` returns the last event that
// the page has, so that a new connection begins where the last one ended. `fetch` and not
// EventSource: it reports why there is no stream, and a silent stream is closed.
const STALE_MS = 15000;
const RETRY_MS = 1000;
const RETRY_MAX_MS = 8000;

export function live(path, since, handlers) {
  let running = false;
  let request = null;
  let timer = 0;
  let wait = RETRY_MS;

  async function connect() {
    if (!running || document.hidden || request) return;
    const own = (request = new AbortController());
    let stale = setTimeout(() => own.abort(), STALE_MS);
    try {
      const last = since();
      const url = last === undefined ? path : `${path}?since=${last}`;
      const response = await fetch(url, { signal: own.signal, cache: "no-store", headers: { "HX-Request": "true" } });
      // It connects again when the operator comes back from the tab of the log-in.
      if (response.status === 401) return ended();
      if (!response.ok) return lost(refusal(response));
      connection("");
      for await (const { event, data } of events(response.body)) {
        clearTimeout(stale);
        stale = setTimeout(() => own.abort(), STALE_MS);
        wait = RETRY_MS;
        handlers[event]?.(data);
      }
      lost(LOST);
    } catch {
      if (own === request) lost(LOST);
    } finally {
      clearTimeout(stale);
      if (own === request) request = null;
    }
  }

  function refusal(response) {
    const seconds = Number(response.headers.get("Retry-After"));
    if (response.status !== 503 || !seconds) return LOST;
    wait = Math.max(wait, seconds * 1000);
    return `The service has no room for another live page. This page asks again in ${seconds} seconds.`;
  }

  function lost(text) {
    if (!running) return;
    connection(text);
    clearTimeout(timer);
    // Many pages do not all come back at the same moment.
    timer = setTimeout(connect, wait * (0.75 + Math.random() / 2));
    wait = Math.min(wait * 2, RETRY_MAX_MS);
  }

  function disconnect() {
    clearTimeout(timer);
    const own = request;
    request = null;
    own?.abort();
  }

  const stream = {
    start() {
      running = true;
      wait = RETRY_MS;
      connect();
    },
    stop() {
      running = false;
      disconnect();
    },
  };
  // A page in the background needs no stream; it gets the missed steps when it is shown again.
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", (event) => event.persisted && connect());
  window.addEventListener("online", () => { disconnect(); connect(); });
  stream.start();
  return stream;
}

// Yields the events of a stream. A comment is an event without a name.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = { event: "", data: [] };
      for (const line of block.split("\n")) {
        const [, name, value] = /^(event|data): (.*)$/.exec(line) ?? [];
        if (name === "data") found.data.push(value);
        else if (name) found.event = value;
      }
      yield { event: found.event, data: found.data.join("\n") };
    }
  }
}
