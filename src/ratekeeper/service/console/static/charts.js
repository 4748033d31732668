// The code that the charts of counts share: colours of the page, axes, bars, and drawing them again.

import uPlot from "./vendor/uplot.js";

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Axes and scales of whole numbers over time. `step` is the length of the last bar in seconds.
export function countsOverTime(times, step) {
  const line = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--faint"), grid: line, ticks: line };
  return {
    scales: { x: { time: true, range: [times[0], times.at(-1) + step] }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 4)] } },
    axes: [axis, { ...axis, size: 56, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7] }],
  };
}

export function bars(label, name) {
  return { label, stroke: colour(name), fill: colour(name), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 60], align: 1 }) };
}

// Draws a chart, again when the colours change, and in the width that its element has.
export function keepDrawn(element, height, draw) {
  const drawn = () => {
    element.replaceChildren();
    return draw();
  };
  let chart = drawn();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { chart = drawn(); });
  new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height })).observe(element);
}
