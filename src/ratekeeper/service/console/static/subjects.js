// The chart of a subject's usage: denied requests below, allowed ones on top of them.

import { bars, countsOverTime, keepDrawn } from "./charts.js";
import uPlot from "./vendor/uplot.js";

const element = document.getElementById("usage");
const HEIGHT = 190;

function draw() {
  const { times, allowed, denied } = JSON.parse(document.getElementById("usage-data").textContent);
  const step = times.length > 1 ? times[1] - times[0] : 60;
  // The line of the allowed requests has the denied ones below it; the legend tells each apart.
  const counted = (counts) => (_, __, ___, at) => (at === null ? "–" : counts[at].toLocaleString());
  return new uPlot(
    {
      width: element.clientWidth,
      height: HEIGHT,
      cursor: { y: false, drag: { x: false, y: false } },
      ...countsOverTime(times, step),
      series: [{}, { ...bars("Allowed", "--accent"), value: counted(allowed) }, { ...bars("Denied", "--bad"), value: counted(denied) }],
    },
    [times, allowed.map((count, at) => count + denied[at]), denied],
    element,
  );
}

if (element) keepDrawn(element, HEIGHT, draw);
