// The chart of denials over time. A period that is marked with the mouse becomes the page's period.

import { bars, countsOverTime, keepDrawn } from "./charts.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 200;
const element = document.getElementById("chart");
const data = document.getElementById("chart-data");

function draw() {
  const { times, counts, seconds } = JSON.parse(data.textContent);
  return new uPlot(
    {
      width: element.clientWidth,
      height: HEIGHT,
      cursor: { y: false, drag: { x: true, y: false, setScale: false } },
      legend: { live: true },
      ...countsOverTime(times, seconds),
      series: [{}, bars("Requests", "--bad")],
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
}

if (element) keepDrawn(element, HEIGHT, draw);
