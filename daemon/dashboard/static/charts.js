/* Charts: `<div data-chart="/defects/trend.json" aria-label="Fails by day"></div>`, drawn by uPlot, with a table of the
   same numbers under it. The address answers
   {"kind": "time" | "number" | "category",        what x is: seconds since 1970, a number, or a name
    "x": [...],
    "series": [{"label": "fail", "values": [...], "tone": "fail", "style": "line" | "bars" | "area", "unit": "%"}],
    "from": 1795336200, "to": 1795336800,           the ends of the axis of time; without them, of the values
    "empty": "No fails yet"}                        said where x is empty
   Tones: pass fail review unknown accent muted other1 … other4. A null is a gap. `data-every="10"` asks again every 10 s.
   `data-height="180"` is in pixels. */
"use strict";

const plots = new Map();
const LABEL_PX = 24; // from one slanted name to the next
const SLANTED_PX = 50; // room at the right for the last one
const DASHES = [undefined, [7, 4], [2, 3], [10, 3, 2, 3]]; // lines that lie on each other are seen all the same

function colour(tone) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + (tone || "accent")).trim();
}
function text(value, series) {
  if (value === null || value === undefined) return "–";
  const rounded = typeof value === "number" ? Math.round(value * 100) / 100 : value;
  return series.unit ? `${rounded} ${series.unit}` : `${rounded}`;
}
function said(at_s, time) {
  return new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: time, hourCycle: "h23", ...ZONE }).format(at_s * 1000);
}
/* 08:54, or 08:54:30 where they lie close; the day under the first and wherever a new one begins. */
function times(splits, step_s) {
  let before = "";
  return splits.map((at_s) => {
    const [day, time] = said(at_s, step_s < 60 ? "medium" : "short").split(" ");
    const isNew = day !== before;
    before = day;
    return step_s >= 86400 ? day : isNew ? `${time}\n${day}` : time;
  });
}
function nameOf(data, at) {
  if (data.kind === "time") return said(data.x[at], "short");
  return String(data.x[at]);
}
function isLine(one) {
  return one.style !== "bars" && one.style !== "area";
}
function options(data, place) {
  const axis = { stroke: colour("muted"), grid: { stroke: colour("rule"), width: 1 }, ticks: { stroke: colour("rule"), width: 1 } };
  const x = { ...axis, grid: { show: false } };
  if (data.kind === "time") Object.assign(x, { values: (_, splits, _axis, _space, step_s) => times(splits, step_s), space: 76 });
  if (data.kind === "category") {
    const each = Math.ceil((data.x.length * LABEL_PX) / (place.clientWidth - 60 - SLANTED_PX)); // names of some, where all would overlap
    x.values = (_, splits) => splits.map((at) => (Number.isInteger(at) && at % each === 0 && data.x[at] !== undefined ? String(data.x[at]) : ""));
    x.splits = () => data.x.map((_, at) => at);
    const longest = Math.max(1, ...data.x.map((name) => String(name).length));
    if (data.x.length * longest * 8 > place.clientWidth) {
      x.rotate = -45;
      x.size = Math.min(110, 24 + longest * 5);
    }
  }
  const bars = uPlot.paths.bars({ size: [0.7, 60] });
  return {
    width: place.clientWidth,
    height: Number(place.dataset.height || 200),
    legend: { show: data.series.length > 1, live: false, markers: { dash: (plot, at) => (plot.series[at].dash ? "dashed" : "solid") } },
    cursor: { drag: { x: false, y: false } },
    padding: [null, x.rotate ? SLANTED_PX : null, null, null],
    ...(ZONE.timeZone && { tzDate: (at_s) => uPlot.tzDate(new Date(at_s * 1000), ZONE.timeZone) }),
    scales: {
      x: {
        time: data.kind === "time",
        ...(data.kind === "category" && { range: [-0.6, data.x.length - 0.4] }),
        ...(data.from !== undefined && { range: [data.from, data.to] }),
      },
      y: { range: (_, low, high) => [Math.min(0, low), high <= 0 ? 1 : high * 1.08] },
    },
    axes: [x, { ...axis, size: 56, values: (_, splits) => splits.map((value) => text(value, data.series[0])) }],
    series: [
      {},
      ...data.series.map((one) => ({
        label: one.label,
        stroke: colour(one.tone),
        width: one.style === "bars" ? 0 : 2,
        dash: isLine(one) ? DASHES[data.series.filter(isLine).indexOf(one) % DASHES.length] : undefined,
        fill: one.style === "bars" ? colour(one.tone) : one.style === "area" ? colour(one.tone) + "33" : undefined,
        paths: one.style === "bars" ? bars : undefined,
        points: { show: one.style !== "bars" && data.x.length < 40, size: 5 },
      })),
    ],
  };
}
function table(data) {
  const made = document.createElement("table");
  made.className = "rows";
  const head = made.createTHead().insertRow();
  for (const name of ["", ...data.series.map((one) => one.label)]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const body = made.createTBody();
  data.x.slice(-500).forEach((_, tail) => {
    const at = Math.max(0, data.x.length - 500) + tail;
    const row = body.insertRow();
    const cell = document.createElement("th");
    cell.scope = "row";
    cell.textContent = nameOf(data, at);
    row.append(cell);
    for (const one of data.series) {
      const value = row.insertCell();
      value.className = "num";
      value.textContent = text(one.values[at], one);
    }
  });
  return made;
}
function numbers(place, data) {
  let details = place.nextElementSibling;
  if (!details?.matches("details.chart-numbers")) {
    details = document.createElement("details");
    details.className = "chart-numbers";
    details.innerHTML = '<summary>As a table</summary><div class="scroll" tabindex="0" role="region"></div>';
    details.lastElementChild.setAttribute("aria-label", place.getAttribute("aria-label") || "Numbers of the chart");
    place.after(details);
  }
  details.lastElementChild.replaceChildren(table(data));
  nameCells(details);
}
function draw(place, data) {
  plots.get(place)?.plot?.destroy();
  place.setAttribute("role", "img");
  place.replaceChildren();
  if (!data.x.length) {
    place.textContent = data.empty || "Nothing yet";
    plots.set(place, { data });
    if (place.nextElementSibling?.matches("details.chart-numbers")) place.nextElementSibling.remove();
    return;
  }
  const x = data.kind === "category" ? data.x.map((_, at) => at) : data.x;
  const plot = new uPlot(options(data, place), [x, ...data.series.map((one) => one.values)], place);
  plots.set(place, { data, plot });
  numbers(place, data);
}
async function load(place) {
  try {
    const answer = await fetch(place.dataset.chart, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(await answer.text());
    draw(place, await answer.json());
  } catch (error) {
    place.textContent = `No chart: ${error.message.slice(0, 300)}`;
  }
}
function startCharts(root) {
  for (const place of root.querySelectorAll("[data-chart]")) {
    if (plots.has(place)) continue;
    plots.set(place, {});
    load(place);
    const every = Number(place.dataset.every || 0) * 1000;
    if (!every) continue;
    const timer = setInterval(() => {
      if (!place.isConnected) clearInterval(timer);
      else if (!document.hidden) load(place);
    }, every);
  }
}
function redraw() {
  for (const [place, { data }] of plots) {
    if (!place.isConnected) plots.delete(place);
    else if (data) draw(place, data);
  }
}
let resizing;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redraw, 150);
});
document.addEventListener("theme", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
startCharts(document);
