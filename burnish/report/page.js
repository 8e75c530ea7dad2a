"use strict";
// Draws the charts of the page from the JSON beside it; colours are those of the style sheet, in light and in dark.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const NUM_COLOURS = 8;
  const hidden = charts.map(() => new Set());
  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dashOf = (trace) => DASHES[(trace.dash + Math.floor(trace.colour / NUM_COLOURS)) % DASHES.length];
  const colourOf = (trace) => `var(--c${trace.colour % NUM_COLOURS})`;

  function drawn(chart, number) {
    return chart.traces.map((trace) => {
      const colour = shade(`--c${trace.colour % NUM_COLOURS}`);
      const raw = trace.style === "raw";
      const marked = trace.style === "marked" || trace.x.length < 30;
      return {
        type: "scatter", x: trace.x, y: trace.y, name: trace.name,
        mode: marked && !raw ? "lines+markers" : "lines",
        visible: !hidden[number].has(trace.label),
        opacity: raw ? 0.5 : 1,
        line: { color: colour, width: raw ? 1 : 2, dash: dashOf(trace) },
        marker: { color: colour, size: trace.style === "marked" ? 7 : 5 },
        hovertemplate: `%{y:.5~g}${chart.suffix}`,
      };
    });
  }

  function layout(chart) {
    const steps = chart.traces.flatMap((trace) => [trace.x[0], trace.x[trace.x.length - 1]]);
    const span = Math.max(...steps) - Math.min(...steps);
    const axis = {
      color: shade("--soft"), gridcolor: shade("--line"), zeroline: false, linecolor: shade("--line"),
      automargin: true, nticks: 6, showspikes: false,
    };
    const spike = { showspikes: true, spikecolor: shade("--soft"), spikethickness: 1, spikedash: "dot", spikemode: "across" };
    const x = { ...axis, ...spike, showgrid: false, tickformat: ",d", hoverformat: ",d", title: { text: "step", standoff: 6 } };
    if (span < 6) Object.assign(x, { dtick: 1, nticks: undefined });
    if (span === 0) x.range = [steps[0] - 1, steps[0] + 1];
    return {
      xaxis: x,
      yaxis: { ...axis, ...(chart.tick === "e" ? { exponentformat: "e" } : { tickformat: chart.tick }), ticksuffix: chart.suffix },
      margin: { l: 48, r: 14, t: 10, b: 40 },
      paper_bgcolor: shade("--card"), plot_bgcolor: shade("--card"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: shade("--ink") },
      showlegend: false,
      hovermode: "x unified",
      hoverlabel: { bgcolor: shade("--card"), bordercolor: shade("--line"), font: { color: shade("--ink"), size: 12 }, namelength: 28 },
      // A finger that scrolls the page must not zoom.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    };
  }

  const plots = [...document.querySelectorAll(".plot")];
  const settings = { responsive: true, displayModeBar: false };
  const draw = (number) => Plotly.react(plots[number], drawn(charts[number], number), layout(charts[number]), settings);

  function line(trace) {
    const namespace = "http://www.w3.org/2000/svg";
    const icon = document.createElementNS(namespace, "svg");
    const stroke = document.createElementNS(namespace, "line");
    const dashes = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2", longdash: "9 3", longdashdot: "9 2 2 2" };
    for (const [key, value] of Object.entries({ width: 20, height: 8, "aria-hidden": "true" })) icon.setAttribute(key, value);
    for (const [key, value] of Object.entries({ x1: 0, x2: 20, y1: 4, y2: 4, "stroke-width": 3, "stroke-dasharray": dashes[dashOf(trace)] })) stroke.setAttribute(key, value);
    stroke.style.stroke = colourOf(trace);
    icon.append(stroke);
    return icon;
  }

  function addLegend(number) {
    const curves = new Map(charts[number].traces.map((trace) => [trace.label, trace]));
    if (curves.size === 1 && curves.has(charts[number].title)) return;
    for (const [label, trace] of curves) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(line(trace), label);
      button.addEventListener("click", () => {
        const shown = hidden[number].delete(label);
        if (!shown) hidden[number].add(label);
        button.setAttribute("aria-pressed", String(shown));
        draw(number);
      });
      plots[number].nextElementSibling.append(button);
    }
  }

  const drawAll = () => plots.forEach((_, number) => draw(number));
  plots.forEach((_, number) => addLegend(number));
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
