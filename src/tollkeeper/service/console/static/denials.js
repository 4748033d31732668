// The chart of denials over time. A period that is marked with the mouse becomes the page's period.

import uPlot from "./vendor/uplot.js";

const element = document.getElementById("chart");
const data = document.getElementById("chart-data");

function draw() {
  const { times, counts, seconds } = JSON.parse(data.textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  element.replaceChildren();
  const chart = new uPlot(
    {
      width: element.clientWidth,
      height: 200,
      cursor: { y: false, drag: { x: true, y: false, setScale: false } },
      legend: { live: true },
      scales: { x: { time: true, range: [times[0], times.at(-1) + seconds] }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 4)] } },
      axes: [axis, { ...axis, size: 56, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7] }],
      series: [
        {},
        { label: "Requests", stroke: colour("--bad"), fill: colour("--bad"), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 60], align: 1 }) },
      ],
      hooks: {
        setSelect: [
          (chart) => {
            if (chart.select.width < 4) return;
            const at = (position) => Math.round(chart.posToVal(position, "x") / seconds) * seconds;
            const from = at(chart.select.left);
            const to = Math.max(at(chart.select.left + chart.select.width), from + seconds);
            const there = new URL(element.dataset.url, location.href);
            const text = (time) => new Date(time * 1000).toISOString().replace(".000Z", "Z");
            there.searchParams.set("from", text(from));
            there.searchParams.set("to", text(to));
            location.assign(there);
          },
        ],
      },
    },
    [times, counts],
    element,
  );
  return chart;
}

if (element) {
  let chart = draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { chart = draw(); });
  new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height: 200 })).observe(element);
}
