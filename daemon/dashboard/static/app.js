/* Scripts of every page: times in the plant's zone or else the reader's, live parts, keys, light and dark. Pages work
   with links and forms alone; this makes them live and quick. */
"use strict";

/* Times: `<time datetime="…Z" data-style="full|time|date">`; the server's text with its zone stays in the title. */
const ZONE = document.body.dataset.zone ? { timeZone: document.body.dataset.zone } : {};
const ZONED = {
  full: { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" },
  time: { hour: "2-digit", minute: "2-digit", second: "2-digit" },
  date: { year: "numeric", month: "2-digit", day: "2-digit" },
  dated: { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" },
};
if (ZONE.timeZone) ZONED.full.timeZoneName = "short";
const FORMATS = Object.fromEntries(
  Object.entries(ZONED).map(([name, options]) => [name, new Intl.DateTimeFormat("sv-SE", { ...options, ...ZONE })]),
);
let today = "";
function localTimes(root) {
  today = FORMATS.date.format(new Date());
  for (const time of root.querySelectorAll("time[datetime]:not([data-local])")) {
    const moment = new Date(time.dateTime);
    if (Number.isNaN(moment.getTime())) continue;
    const style = time.dataset.style || "full";
    const isOld = style === "time" && FORMATS.date.format(moment) !== today;
    time.textContent = FORMATS[isOld ? "dated" : style].format(moment);
    time.dataset.local = "";
  }
}
/* At midnight the times of yesterday get their date. */
setInterval(() => {
  if (FORMATS.date.format(new Date()) === today) return;
  for (const time of document.querySelectorAll("time[data-local]")) delete time.dataset.local;
  localTimes(document);
}, 10000);

/* Live parts: `<body data-events="line boards">` listens; the event `line` fills `[data-live="line"]`, and the document
   gets the event `live:line`, whose detail is the text. */
let stream = null;
let retry = null;
const topics = (document.body.dataset.events || "").split(" ").filter(Boolean);
function say(state, text) {
  const place = document.getElementById("live-state");
  place.hidden = false;
  place.dataset.state = state;
  if (place.textContent !== text) place.textContent = text;
}
function listen() {
  clearTimeout(retry);
  if (!topics.length || stream) return;
  stream = new EventSource("/events?" + topics.map((topic) => "topic=" + encodeURIComponent(topic)).join("&"));
  stream.onopen = () => say("on", "live");
  stream.onerror = () => {
    if (stream && stream.readyState === EventSource.CLOSED) {
      stream = null;
      say("off", "not live: reload the page");
      retry = setTimeout(listen, 10000);
    } else say("off", "reconnecting");
  };
  for (const topic of topics)
    stream.addEventListener(topic, (event) => {
      document.dispatchEvent(new CustomEvent("live:run", { detail: event.lastEventId }));
      show(topic, event.data);
    });
}
function stopListening() {
  clearTimeout(retry);
  if (stream) stream.close();
  stream = null;
}
function show(topic, text) {
  for (const part of document.querySelectorAll(`[data-live="${topic}"]`)) {
    const known = new Set([...part.querySelectorAll("[data-new]")].map((row) => row.dataset.new));
    const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    const opened = [...part.querySelectorAll("details[open][id]")].map((one) => one.id);
    const scrolled = [...part.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
    part.innerHTML = text;
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
    [...part.querySelectorAll(".scroll")].forEach((box, at) => scrolled[at] && box.scrollTo(...scrolled[at]));
    for (const row of part.querySelectorAll("[data-new]"))
      if (known.size && !known.has(row.dataset.new)) row.classList.add("new");
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    settle(part);
  }
  document.dispatchEvent(new CustomEvent("live:" + topic, { detail: text }));
}

/* A screen reader announces the `[data-announce]` of a live part when it has changed, at most every 5 s; a `data-urgent`
   one at once. */
const announced = new Map();
let announceAt = 0;
function announce(part) {
  const source = part.querySelector("[data-announce]");
  const text = source?.dataset.announce || "";
  const before = announced.get(part);
  const isEarly = Date.now() < announceAt && !(source && "urgent" in source.dataset);
  if (text === before || (before !== undefined && isEarly)) return;
  announced.set(part, text);
  if (before === undefined || !text) return;
  document.getElementById("announce").textContent = text;
  announceAt = Date.now() + 5000;
}
/* On a telephone a row of a table is a card (app.css): each cell says what its column is called. */
function nameCells(root) {
  for (const table of root.querySelectorAll("table.rows:has(thead)")) {
    const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.replace(/[▴▾]/g, "").trim());
    for (const row of table.tBodies[0]?.rows || [])
      [...row.cells].forEach((cell, at) => (cell.dataset.name = cell.colSpan > 1 ? "" : names[at] || ""));
  }
}
function settle(root) {
  localTimes(root);
  nameCells(root);
  for (const part of root === document ? root.querySelectorAll("[data-live]") : [root]) announce(part);
}

/* Light and dark. */
function otherTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
}

/* Keys. A page adds its own with `addKey("d", decide)`. They have no effect while somebody types. */
const keys = new Map();
function addKey(key, act) {
  keys.set(key, act);
}
function openHelp() {
  const help = document.getElementById("help");
  if (!help.open) help.showModal();
}
function step(by) {
  const rows = [...document.querySelectorAll("[data-rows] a[data-row], [data-rows] button[data-row]")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? 0 : at + by))].focus();
}
let going = 0;
function onKey(event) {
  const typing = event.target.closest("input, select, textarea, [contenteditable]");
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (Date.now() < going) {
    going = 0;
    const target = [...document.querySelectorAll("[data-go]")].find((link) => link.dataset.go === event.key);
    if (target) {
      event.preventDefault();
      target.click();
      return;
    }
  }
  if (event.key === "g") {
    going = Date.now() + 1500;
    return;
  }
  const act = keys.get(event.key);
  if (act) {
    event.preventDefault();
    act(event);
  }
}
addKey("?", openHelp);
addKey("t", otherTheme);
addKey("b", () => document.documentElement.classList.toggle("no-boxes"));
addKey("j", () => step(1));
addKey("k", () => step(-1));
addKey("p", () => document.querySelector("[data-print]") && window.print());
addKey("/", () => document.querySelector("[data-search], main input, main select")?.focus());

for (const part of document.querySelectorAll("[data-key]"))
  addKey(part.dataset.key, (event) => event.repeat || (part.localName === "input" ? part.focus() : part.click()));

document.addEventListener("keydown", onKey);
document.getElementById("theme").addEventListener("click", otherTheme);
document.getElementById("help-open").addEventListener("click", openHelp);
for (const button of document.querySelectorAll("[data-print]")) button.addEventListener("click", () => window.print());
/* A browser has six connections to one host: a hidden tab releases its own. */
document.addEventListener("visibilitychange", () => (document.hidden ? stopListening() : listen()));
window.addEventListener("pagehide", stopListening);
window.addEventListener("pageshow", (event) => event.persisted && listen());
settle(document);
if (!document.hidden) listen();
