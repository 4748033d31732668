// The charts of the overview. `steps` has the data of the live stream: one value for each step of
// two seconds, for at most 15 minutes. Everything on the page is drawn from it again at each event.
import uPlot from "./vendor/uplot.js";
import { connection, keepScroll, live, refresh, restoreScroll } from "./console.js";

const OUTCOMES = {
  allowed: "A limit allowed it.",
  denied: "A limit or a penalty denied it.",
  unlimited: "No rule applies, so it is allowed.",
  exempt: "The allow list has it, so it is allowed.",
  blocked: "The deny list has it, so it is denied.",
  unavailable: "The store failed, and the rule denies then.",
  failed: "The store failed, so there was no decision.",
};
const MEASURES = { allowed: "Allowed", denied: "Denied", shadow_denied: "Would be denied", degraded: "Degraded" };
const ALLOWED = ["allowed", "unlimited", "exempt"];
const DENIED = ["denied", "blocked", "unavailable"];
const LINES_MAX = 7;
const NOW_SECONDS = 10;
const WINDOW_MIN_SECONDS = 120;
const SYNC = "overview";

const byId = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
let chosenRule = query.get("rule") ?? "";
let measure = query.get("show") in MEASURES ? query.get("show") : "denied";

// ── Steps ──────────────────────────────────────────────────────────────────────────────────────

const steps = { at: [], seconds: [], p50_ms: [], p99_ms: [], degraded: [], shadow_denied: [], checks: {}, rules: new Map() };
let historySeconds = 900;
for (const name of Object.keys(OUTCOMES)) steps.checks[name] = [];

// All arrays of steps; each has the same length.
function columns() {
  const { at, seconds, p50_ms, p99_ms, degraded, shadow_denied, checks, rules } = steps;
  const own = [at, seconds, p50_ms, p99_ms, degraded, shadow_denied, ...Object.values(checks)];
  for (const rule of rules.values()) own.push(...Object.values(rule));
  return own;
}

function add(news) {
  historySeconds = news.history_seconds;
  if (news.complete) {
    // A service that was started again has no old steps; those of before stay on the page.
    const first = news.at.length ? news.at[0] : Infinity;
    const kept = steps.at.filter((at) => at < first).length;
    for (const column of columns()) column.length = kept;
  }
  const last = steps.at.at(-1) ?? 0;
  const from = news.at.findIndex((at) => at > last);
  if (from >= 0) append(news, from);
  const oldest = (steps.at.at(-1) ?? 0) - historySeconds;
  const old = steps.at.findIndex((at) => at > oldest);
  if (old > 0) for (const column of columns()) column.splice(0, old);
  for (const [name, rule] of steps.rules) {
    if (Object.values(rule).every((column) => column.every((value) => !value))) steps.rules.delete(name);
  }
}

function append(news, from) {
  const before = steps.at.length;
  const count = news.at.length - from;
  const put = (column, values) => column.push(...(values ? values.slice(from) : new Array(count).fill(0)));
  for (const name of ["at", "seconds", "p50_ms", "p99_ms", "degraded", "shadow_denied"]) put(steps[name], news[name]);
  for (const name of Object.keys(OUTCOMES)) put(steps.checks[name], news.checks[name]);
  const given = new Map(news.rules.map((rule) => [rule.rule, rule]));
  for (const name of given.keys()) {
    if (steps.rules.has(name)) continue;
    const zeros = Object.keys(MEASURES).map((key) => [key, new Array(before).fill(0)]);
    steps.rules.set(name, Object.fromEntries(zeros));
  }
  for (const [name, rule] of steps.rules) {
    for (const key of Object.keys(MEASURES)) put(rule[key], given.get(name)?.[key]);
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const plus = (...lists) => steps.at.map((_, i) => sum(lists.map((list) => list[i])));
const outcomes = (names) => plus(...names.map((name) => steps.checks[name]));

// The data of the figures and the first chart: all checks, or the decisions of the chosen rule.
function chosen() {
  const rule = chosenRule && steps.rules.get(chosenRule);
  if (chosenRule) {
    const zeros = steps.at.map(() => 0);
    const found = rule || { allowed: zeros, denied: zeros, shadow_denied: zeros, degraded: zeros };
    return { checks: plus(found.allowed, found.denied, found.shadow_denied), ...found };
  }
  return {
    checks: outcomes(Object.keys(OUTCOMES)),
    allowed: outcomes(ALLOWED),
    denied: outcomes(DENIED),
    shadow_denied: steps.shadow_denied,
    degraded: steps.degraded,
  };
}

// ── Text ───────────────────────────────────────────────────────────────────────────────────────

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const rate = (value) => (value >= 100 ? whole.format(Math.round(value)) : short.format(value));
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const precise = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const millis = (value) => (value == null ? "–" : value >= 1 ? `${short.format(value)} ms` : `${short.format(value * 1000)} µs`);
const span = () => {
  const minutes = Math.round(sum(steps.seconds) / 60);
  return minutes > 1 ? `${minutes} minutes` : "minute";
};

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function figures(now) {
  const from = Math.max(0, steps.at.findIndex((at) => at > steps.at.at(-1) - NOW_SECONDS));
  const seconds = sum(steps.seconds.slice(from));
  for (const name of ["checks", "allowed", "denied", "degraded"]) {
    const [, shown, hint] = byId(`figure-${name}`).children;
    text(shown, rate(sum(now[name].slice(from)) / (seconds || 1)));
    text(hint, `${whole.format(sum(now[name]))} in ${span().replace(/^m/, "a m")}`);
    byId(`figure-${name}`).classList.toggle("alarm", name === "degraded" && sum(now[name].slice(from)) > 0);
  }
  for (const name of ["p50", "p99"]) {
    const known = steps[`${name}_ms`].filter((value) => value != null);
    const [, shown, hint] = byId(`figure-${name}`).children;
    text(shown, millis(steps[`${name}_ms`].slice(from).findLast((value) => value != null)));
    text(hint, known.length ? `worst ${millis(Math.max(...known))}` : "no checks yet");
  }
}

function summaries(now, lines) {
  const total = sum(now.checks);
  const share = total ? ` (${short.format((100 * sum(now.denied)) / total)} %)` : "";
  const what = chosenRule ? `${whole.format(total)} decisions of ${chosenRule}` : `${whole.format(total)} checks`;
  text(
    byId("checks-summary"),
    `The last ${span()}: ${what}, ${whole.format(sum(now.allowed))} allowed, ` +
      `${whole.format(sum(now.denied))} denied${share}, ${whole.format(sum(now.shadow_denied))} would be denied by ` +
      `rules in shadow mode, ${whole.format(sum(now.degraded))} degraded.`,
  );
  const parts = lines.filter((line) => line.total).map((line) => `${line.name} ${whole.format(line.total)}`);
  text(
    byId("rules-summary"),
    parts.length
      ? `${MEASURES[measure]} in the last ${span()}: ${parts.join(", ")}.`
      : `Nothing in the last ${span()}: no line to show.`,
  );
  const known = steps.p99_ms.filter((value) => value != null);
  text(
    byId("times-summary"),
    known.length
      ? `From request to result. The slowest two seconds had a 99th percentile of ${millis(Math.max(...known))}.`
      : `From request to result. No checks in the last ${span()}.`,
  );
}

// ── Tables ─────────────────────────────────────────────────────────────────────────────────────

function row(cells) {
  const found = document.createElement("tr");
  cells.forEach((cell, i) => {
    const element = document.createElement(i ? "td" : "th");
    if (!i) element.scope = "row";
    if (typeof cell === "number" || /^(–|\d.*[µm]s)$/.test(cell)) element.className = "number";
    if (cell instanceof Node) element.append(cell);
    else element.textContent = typeof cell === "number" ? whole.format(cell) : cell;
    found.append(element);
  });
  return found;
}

function ruleLink(name) {
  if (name.startsWith("(")) return name;
  const link = document.createElement("a");
  link.id = `rule-${encodeURIComponent(name)}`;
  link.href = `/console/denials?${new URLSearchParams({ rule: name })}`;
  link.textContent = name;
  return link;
}

function share(denied, total) {
  const found = document.createElement("span");
  const bar = document.createElement("span");
  const part = document.createElement("span");
  found.className = "share";
  bar.className = "bar";
  part.style.width = `${total ? (100 * denied) / total : 0}%`;
  bar.append(part);
  found.append(bar, `${total ? short.format((100 * denied) / total) : 0} %`);
  return found;
}

// Replaces the rows of a table that have changed, and keeps the focus where it is.
function fill(id, rows) {
  const focused = document.activeElement?.id;
  const body = byId(id).tBodies[0];
  rows.forEach((each, i) => {
    if (i >= body.rows.length) body.append(each);
    else if (!body.rows[i].isEqualNode(each)) body.rows[i].replaceWith(each);
  });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  if (focused && document.activeElement?.id !== focused) byId(focused)?.focus();
}

function emptyRow(text, columns) {
  const found = row([text]);
  found.cells[0].colSpan = columns;
  return found;
}

function tables() {
  const totals = [...steps.rules].map(([name, rule]) => {
    const [allowed, denied, shadow, degraded] = Object.keys(MEASURES).map((key) => sum(rule[key]));
    return { name, allowed, denied, shadow, degraded, total: allowed + denied + shadow };
  });
  totals.sort((a, b) => b.denied - a.denied || b.total - a.total);
  const rows = totals.map((each) =>
    row([ruleLink(each.name), each.allowed, each.denied, each.shadow, each.degraded, share(each.denied, each.total)]),
  );
  fill("totals", rows.length ? rows : [emptyRow(`No rule decided anything in the last ${span()}.`, 6)]);
  text(byId("totals-caption"), `In the last ${span()}, the most denials first.`);
  if (!byId("outcomes").closest("details").open) return;
  fill("outcomes", Object.entries(OUTCOMES).map(([name, meaning]) => row([name, sum(steps.checks[name]), meaning])));
  fill("minutes", minutes());
}

// In the viewer's zone, and UTC on hover.
function timeOf(seconds) {
  const found = document.createElement("time");
  const at = new Date(seconds * 1000);
  found.dateTime = at.toISOString();
  found.title = `${found.dateTime.slice(0, 19).replace("T", " ")} UTC`;
  found.textContent = clock.format(at);
  return found;
}

function minutes() {
  const now = chosen();
  text(byId("minutes-caption"), `By minute, the newest first${chosenRule ? `: ${chosenRule}` : ""}.`);
  const groups = new Map();
  steps.at.forEach((at, i) => {
    const minute = Math.floor(at / 60) * 60;
    if (!groups.has(minute)) groups.set(minute, []);
    groups.get(minute).push(i);
  });
  return [...groups].reverse().map(([minute, places]) => {
    const of = (column) => sum(places.map((i) => column[i]));
    const most = (column) => millis(Math.max(...places.map((i) => column[i] ?? -1))).replace(/^-.*/, "–");
    return row([
      timeOf(minute),
      ...[now.allowed, now.denied, now.shadow_denied, now.degraded].map(of),
      most(steps.p50_ms),
      most(steps.p99_ms),
    ]);
  });
}

// ── Charts ─────────────────────────────────────────────────────────────────────────────────────

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Chart {
  // `format` shows a value; `lines` are {name, colour, dash, fill}, set by `draw`.
  constructor(name, format) {
    this.box = byId(`${name}-chart`);
    this.legend = byId(`${name}-legend`);
    this.format = format;
    this.hidden = new Set();
    this.names = null;
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  size() {
    return { width: Math.max(120, Math.floor(this.box.clientWidth)), height: this.box.clientHeight };
  }

  resize() {
    const size = this.size();
    if (this.plot && (size.width !== this.plot.width || size.height !== this.plot.height)) this.plot.setSize(size);
  }

  draw(lines) {
    const names = JSON.stringify(lines.map((line) => line.name));
    this.lines = lines;
    const data = [[], ...lines.map(() => [])];
    steps.at.forEach((at, i) => {
      // A line is interrupted where steps are missing.
      if (i && at - steps.seconds[i] > steps.at[i - 1] + 1) {
        data[0].push(steps.at[i - 1] + 0.5);
        lines.forEach((_, k) => data[k + 1].push(null));
      }
      data[0].push(at);
      lines.forEach((line, k) => data[k + 1].push(line.values[i]));
    });
    if (names !== this.names) this.build(data);
    else this.plot.setData(data);
    this.names = names;
    this.values();
  }

  build(data) {
    this.plot?.destroy();
    const axis = {
      stroke: () => css("--faint"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: () => css("--line"), width: 1 },
      ticks: { stroke: () => css("--line"), width: 1, size: 5 },
    };
    const options = {
      ...this.size(),
      legend: { show: false },
      padding: [8, 24, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: SYNC }, points: { size: 7 } },
      scales: { x: { range: windowOf }, y: { range: (_, min, max) => [0, max > 0 ? max * 1.08 : 1] } },
      axes: [
        { ...axis, space: 70, size: 30, values: (_, all) => all.map((at) => (at % 60 ? precise : clock).format(at * 1000)) },
        { ...axis, size: 56, values: (_, all) => all.map((value) => this.format(value)) },
      ],
      series: [{}, ...this.lines.map((line) => this.series(line))],
      hooks: { setCursor: [() => this.values()] },
    };
    this.plot = new uPlot(options, data, this.box);
    this.buttons();
  }

  series(line) {
    return {
      label: line.name,
      show: !this.hidden.has(line.name),
      stroke: () => css(line.colour),
      fill: line.fill ? () => `${css(line.colour)}22` : undefined,
      dash: line.dash,
      width: 2,
      points: { show: false },
    };
  }

  buttons() {
    const focused = document.activeElement?.id;
    const items = this.lines.map((line, i) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.id = `${this.legend.id}-${encodeURIComponent(line.name)}`;
      button.setAttribute("aria-pressed", String(!this.hidden.has(line.name)));
      const value = document.createElement("b");
      button.append(swatch(line), ` ${line.name} `, value);
      button.addEventListener("click", () => {
        const show = this.hidden.delete(line.name) || !this.hidden.add(line.name);
        button.setAttribute("aria-pressed", String(show));
        this.plot.setSeries(i + 1, { show });
      });
      line.shown = value;
      item.append(button);
      return item;
    });
    this.when = document.createElement("li");
    this.legend.replaceChildren(...items, this.when);
    if (focused) byId(focused)?.focus();
  }

  // The legend has the values at the cursor, or the last ones.
  values() {
    if (!this.plot) return;
    const shown = this.legend.querySelectorAll("b");
    const place = this.plot.cursor.idx ?? this.plot.data[0].length - 1;
    const at = this.plot.cursor.idx == null ? "" : `at ${precise.format(this.plot.data[0][place] * 1000)}`;
    text(this.when, at);
    this.plot.data.slice(1).forEach((column, i) => {
      if (shown[i]) text(shown[i], column[place] == null ? "–" : this.format(column[place]));
    });
  }
}

function windowOf() {
  const last = steps.at.at(-1) ?? Date.now() / 1000;
  const first = steps.at.length ? steps.at[0] - steps.seconds[0] : last;
  return [Math.min(first, last - WINDOW_MIN_SECONDS), last];
}

function swatch(line) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 22 8");
  svg.setAttribute("width", "22");
  svg.setAttribute("height", "8");
  svg.setAttribute("aria-hidden", "true");
  const mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
  mark.setAttribute("d", "M0 4H22");
  mark.setAttribute("stroke-width", "3");
  if (line.dash) mark.setAttribute("stroke-dasharray", line.dash.join(" "));
  mark.style.stroke = `var(${line.colour})`;
  svg.append(mark);
  return svg;
}

const charts = {
  checks: new Chart("checks", rate),
  rules: new Chart("rules", rate),
  times: new Chart("times", millis),
};
const perSecond = (values) => values.map((value, i) => value / (steps.seconds[i] || 1));

// The rules with the most of the chosen measure, and the others together.
function ruleLines() {
  const found = [...steps.rules].map(([name, rule]) => ({ name, values: rule[measure], total: sum(rule[measure]) }));
  found.sort((a, b) => b.total - a.total || (a.name < b.name ? -1 : 1));
  const named = found.filter((line) => line.total && line.name !== "(others)").slice(0, LINES_MAX);
  const others = found.filter((line) => line.total && !named.includes(line));
  if (others.length) {
    named.push({ name: "other rules", values: plus(...others.map((line) => line.values)), total: sum(others.map((line) => line.total)) });
  }
  return named.map((line, i) => ({ ...line, colour: `--line-${i + 1}`, dash: i >= 4 ? [6, 4] : undefined }));
}

function draw() {
  const now = chosen();
  const lines = ruleLines();
  const checks = [
    { name: "Allowed", values: now.allowed, colour: "--good", fill: true },
    { name: "Denied", values: now.denied, colour: "--bad", fill: true },
    { name: "Would be denied", values: now.shadow_denied, colour: "--line-2", dash: [2, 4] },
    { name: "Degraded", values: now.degraded, colour: "--warn", dash: [8, 4] },
  ];
  charts.checks.draw(checks.map((line) => ({ ...line, values: perSecond(line.values) })));
  charts.rules.draw(lines.map((line) => ({ ...line, values: perSecond(line.values) })));
  charts.times.draw([
    { name: "Median", values: steps.p50_ms, colour: "--line-1" },
    { name: "99 of 100", values: steps.p99_ms, colour: "--line-2", dash: [8, 4] },
  ]);
  byId("quiet").hidden = sum(outcomes(Object.keys(OUTCOMES))) > 0;
  text(byId("checks-title"), chosenRule ? `Decisions of ${chosenRule} a second` : "Checks a second");
  figures(now);
  summaries(now, lines);
  tables();
  options();
}

// ── Controls ───────────────────────────────────────────────────────────────────────────────────

function options() {
  const select = byId("rule");
  const names = ["", ...[...steps.rules.keys()].sort()];
  if (chosenRule && !names.includes(chosenRule)) names.push(chosenRule);
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    select.replaceChildren(...names.map((name) => new Option(name || "All rules", name)));
  }
  select.value = chosenRule;
}

function remember() {
  const state = new URLSearchParams();
  if (chosenRule) state.set("rule", chosenRule);
  if (measure !== "denied") state.set("show", measure);
  history.replaceState(null, "", state.size ? `?${state}` : location.pathname);
  draw();
}

byId("rule").addEventListener("change", (event) => {
  chosenRule = event.target.value;
  remember();
});
for (const radio of document.querySelectorAll('input[name="measure"]')) {
  radio.checked = radio.value === measure;
  radio.addEventListener("change", () => {
    measure = radio.value;
    remember();
  });
}
byId("outcomes").closest("details").addEventListener("toggle", tables);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of Object.values(charts)) chart.plot?.redraw();
});

// ── The stream ─────────────────────────────────────────────────────────────────────────────────

// Replaces the cards that have changed, so that the focus stays in those that have not.
const sent = new Map();
function status(html) {
  // The service has rendered it, with every value as text. Scripts in it would not run.
  const parsed = new DOMParser().parseFromString(html, "text/html");
  const focused = document.activeElement?.id;
  keepScroll(document);
  for (const card of parsed.querySelectorAll("section[id]")) {
    if (sent.get(card.id)?.isEqualNode(card)) continue;
    sent.set(card.id, card.cloneNode(true));
    byId(card.id)?.replaceWith(card);
    refresh(card);
  }
  restoreScroll(document);
  if (focused && document.activeElement?.id !== focused) byId(focused)?.focus();
  announce();
}

let announced = document.getElementById("status-findings")?.dataset.active ?? "";
const title = document.title;
function announce() {
  const active = byId("status-findings")?.dataset.active ?? "";
  const names = active.split(", ").filter(Boolean);
  document.title = names.length ? `(${names.length}) ${title}` : title;
  if (active === announced) return;
  announced = active;
  text(byId("news"), active ? `Findings: ${active}.` : "There are no findings any more.");
}

const stream = live("/console/live", () => steps.at.at(-1), {
  activity: (data) => {
    add(JSON.parse(data));
    draw();
  },
  status,
});
byId("pause").addEventListener("click", (event) => {
  const paused = event.target.getAttribute("aria-pressed") !== "true";
  event.target.setAttribute("aria-pressed", String(paused));
  if (paused) stream.stop();
  else stream.start();
  connection(paused ? "The page is paused: it shows the state of the moment you paused it." : "");
});
