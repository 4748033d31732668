// The chart of a subject's usage: denied requests below, allowed ones on top of them.

import uPlot from "./vendor/uplot.js";

const element = document.getElementById("usage");
const HEIGHT = 190;

function draw() {
  const { times, allowed, denied } = JSON.parse(document.getElementById("usage-data").textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const step = times.length > 1 ? times[1] - times[0] : 60;
  const bars = (label, name, counts) => ({
    label,
    stroke: colour(name),
    fill: colour(name),
    width: 0,
    points: { show: false },
    paths: uPlot.paths.bars({ size: [0.8, 60], align: 1 }),
    value: (_, __, ___, at) => (at === null ? "–" : counts[at].toLocaleString()),
  });
  element.replaceChildren();
  return new uPlot(
    {
      width: element.clientWidth,
      height: HEIGHT,
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: true, range: [times[0], times.at(-1) + step] }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 4)] } },
      axes: [axis, { ...axis, size: 56, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7] }],
      series: [{}, bars("Allowed", "--accent", allowed), bars("Denied", "--bad", denied)],
    },
    [times, allowed.map((count, at) => count + denied[at]), denied],
    element,
  );
}

if (element) {
  let chart = draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { chart = draw(); });
  new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height: HEIGHT })).observe(element);
}
