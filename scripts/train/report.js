"use strict";
// Draws the charts of report.html from the data in it. Names of layers are data: Plotly reads some
// HTML in its texts, so they are escaped.

const data = JSON.parse(document.getElementById("data").textContent);
const NOT_FINITE = 2;
// least: the smallest range that the colours stand for; with log: the smallest ratio.
const MEASURES = {
  amax: { title: "amax", hover: "amax %{customdata:.4~g}", least: 10, log: true },
  underflow: { title: "%", hover: "%{customdata:.3~g} % underflow", least: 1, zero: true },
  saturation: { title: "%", hover: "%{customdata:.3~g} % saturated", least: 1, zero: true },
  sqnr: { title: "dB", hover: "SQNR %{customdata:.2f} dB", least: 6, reverse: true },
};
const LINES = {
  loss: { title: "nats per byte", marked: true },
  learning_rate: { title: "learning rate", tickformat: "~e" },
  tokens_per_second: { title: "tokens/s", tickformat: "~s", zero: true },
  memory_bytes: { title: "GiB", factor: 2 ** -30, zero: true },
  grad_norm: { title: "L2 norm", log: true, marked: true },
};
const CONFIG = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

const element = (id) => document.getElementById(id);
const escaped = (text) =>
  text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
}

// The rows of a grid, one typed array per layer.
function rowsOf(grid, name) {
  const whole = name === "state" ? new Uint8Array(bytesOf(grid[name])) : floats(grid[name]);
  const columns = grid.last.length;
  return grid.layers.map((_, row) => whole.subarray(row * columns, (row + 1) * columns));
}

function floats(text) {
  const view = new DataView(bytesOf(text));
  return Float32Array.from({ length: view.byteLength / 4 }, (_, index) =>
    view.getFloat32(4 * index, true),
  );
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function layout(height, changes) {
  const axis = () => ({
    gridcolor: color("grid"),
    linecolor: color("edge"),
    tickcolor: color("edge"),
    zeroline: false,
    automargin: true,
    title: { standoff: 8, font: { color: color("soft"), size: 12 } },
  });
  const hover = { bgcolor: color("panel"), bordercolor: color("edge") };
  const made = {
    height,
    margin: { l: 10, r: 14, t: 10, b: 10 },
    paper_bgcolor: color("panel"),
    plot_bgcolor: color("panel"),
    font: { family: "inherit", size: 12, color: color("text") },
    hoverlabel: { ...hover, align: "left", font: { color: color("text") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("text") },
    showlegend: false,
    xaxis: axis(),
    yaxis: axis(),
  };
  made.xaxis.title.text = "step";
  for (const [name, value] of Object.entries(changes)) {
    made[name] = name.endsWith("axis") ? { ...made[name], ...value } : value;
  }
  return made;
}

function axisTitle(text) {
  return { text, standoff: 8, font: { color: color("soft"), size: 12 } };
}

// Ticks at powers of ten, so far apart that there is room for their labels; at 1, 2 and 5 times
// these where there are few of them; where there is hardly one, at Plotly's choice.
function logAxis(title, values) {
  const shown = values.filter((value) => value > 0 && Number.isFinite(value));
  const decades = Math.log10(Math.max(...shown)) - Math.log10(Math.min(...shown));
  const axis = { type: "log", title: axisTitle(title), tickformat: "~g" };
  if (decades < 0.8) return { ...axis, nticks: 6 };
  return { ...axis, dtick: decades > 2 ? Math.ceil(decades / 7) : "D2" };
}

// Steps as bands behind a line: where its values are not finite, and where anomalies were found.
function bandsOf(x, y, marks) {
  const band = (first, last, changes) => ({
    type: "rect",
    xref: "x",
    yref: "paper",
    x0: first,
    x1: last,
    y0: 0,
    y1: 1,
    layer: "below",
    ...changes,
  });
  const bands = marks.map((step) =>
    band(step, step, { line: { color: color("bad"), width: 1, dash: "dot" } }),
  );
  for (let index = 0; index < y.length; index++) {
    if (y[index] !== null) continue;
    const first = index;
    while (index + 1 < y.length && y[index + 1] === null) index++;
    bands.push(band(x[first] - 0.5, x[index] + 0.5, { fillcolor: color("badback"), line: { width: 0 } }));
  }
  return bands;
}

function drawLine(name) {
  const { title, factor = 1, log, zero, tickformat, marked } = LINES[name];
  const { x, y } = data.lines[name];
  const values = y.map((value) => (value === null ? null : value * factor));
  const trace = {
    type: "scatter",
    mode: values.length > 30 ? "lines" : "lines+markers",
    x,
    y: values,
    line: { color: color("line"), width: 1.6 },
    marker: { size: 4 },
    hovertemplate: `step %{x}<br>%{y:.5~g} ${escaped(title)}<extra></extra>`,
  };
  const linear = { title: axisTitle(title), tickformat, rangemode: zero ? "tozero" : "normal" };
  const yaxis = log ? logAxis(title, values) : linear;
  const changes = { yaxis, shapes: bandsOf(x, y, marked ? data.anomalies : []) };
  Plotly.react(name, [trace], layout(250, changes), CONFIG);
}

function missingLine(name) {
  const note = document.createElement("p");
  note.className = "missing";
  note.textContent = "Not recorded: the run is of an earlier release of the script.";
  element(name).replaceChildren(note);
}

// The range of the colours: from the 1st to the 99th percentile, and by `least` further towards what
// is beyond. A few cells far from all others don't shrink the rest to one colour, and stand out still.
function scaleOf(measure, rows) {
  const { log, least, zero, reverse } = MEASURES[measure];
  const values = rows
    .flatMap((row) => Array.from(row))
    .filter((value) => Number.isFinite(value) && (value > 0 || !log))
    .sort((one, other) => one - other);
  if (!values.length) return null;
  const at = (part) => values[Math.round(part * (values.length - 1))];
  const up = (value) => (log ? value * least : value + least);
  const down = (value) => (log ? value / least : value - least);
  const [smallest, largest] = [at(0), at(1)];
  let low = zero ? 0 : Math.max(smallest, down(at(0.01)));
  let high = Math.min(largest, up(at(0.99)));
  // Differences that don't matter don't get all colours.
  if (reverse) low = Math.min(low, down(high));
  else high = Math.max(high, up(low));
  return { low, high, below: smallest < low, above: largest > high };
}

function roundTicks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 5));
  const every = power * [1, 2, 5, 10].find((digit) => (high - low) / (digit * power) <= 6);
  const first = Math.ceil(low / every);
  return Array.from({ length: Math.floor(high / every) - first + 1 }, (_, i) => (first + i) * every);
}

function logTicks(low, high) {
  const digits = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    ticks.push(...digits.map((digit) => digit * 10 ** power));
  }
  const inside = ticks.filter((value) => value >= low && value <= high);
  const every = Math.ceil(inside.length / 8);
  return inside.filter((_, index) => index % every === 0);
}

// Ticks of a colour bar; those of its ends say that there is more beyond.
function colorTicks(scale, log) {
  const shade = log ? Math.log10 : (value) => value;
  const [low, high] = [shade(scale.low), shade(scale.high)];
  const text = (value) => String(Number(value.toPrecision(2)));
  const ends = [];
  if (scale.below) ends.push({ at: low, text: `≤ ${text(scale.low)}` });
  if (scale.above) ends.push({ at: high, text: `≥ ${text(scale.high)}` });
  const inner = (log ? logTicks : roundTicks)(scale.low, scale.high)
    .map((value) => ({ at: shade(value), text: text(value) }))
    .filter((tick) => ends.every((end) => Math.abs(end.at - tick.at) > 0.07 * (high - low)));
  const ticks = [...inner, ...ends];
  return { tickvals: ticks.map((tick) => tick.at), ticktext: ticks.map((tick) => tick.text) };
}

function heatTraces(grid, measure, rows, scale) {
  const { title, hover, log, reverse } = MEASURES[measure];
  const shade = log ? Math.log10 : (value) => value;
  // What is out of the scale takes the colour of its end: an exact result has an infinite SQNR.
  const z = rows.map((row) =>
    Array.from(row, (value) =>
      Number.isNaN(value) ? null : shade(Math.min(Math.max(value, scale.low), scale.high)),
    ),
  );
  const hovertext = Array(rows.length).fill(grid.steps);
  const y = grid.labels.map(escaped);
  const colorbar = {
    title: { text: title, side: "right", font: { color: color("soft") } },
    thickness: 12,
    outlinewidth: 0,
    xpad: 8,
    ...colorTicks(scale, log),
  };
  const shared = { type: "heatmap", x: grid.last, y, hovertext };
  const values = {
    ...shared,
    z,
    customdata: rows,
    hovertemplate: `<b>%{y}</b><br>%{hovertext}<br>${hover}<extra></extra>`,
    colorscale: "Cividis",
    reversescale: Boolean(reverse),
    zmin: shade(scale.low),
    zmax: shade(scale.high),
    colorbar,
  };
  const state = rowsOf(grid, "state");
  if (!state.some((row) => row.includes(NOT_FINITE))) return [values];
  const bad = {
    ...shared,
    z: state.map((row) => Array.from(row, (value) => (value === NOT_FINITE ? 1 : null))),
    customdata: rows,
    hovertemplate: `<b>%{y}</b><br>%{hovertext}<br>has values that are not finite<br>${hover}<extra></extra>`,
    colorscale: [
      [0, color("bad")],
      [1, color("bad")],
    ],
    showscale: false,
  };
  return [values, bad];
}

function drawHeat(grid, measure) {
  const figure = element(measure).parentElement;
  const [chart, note] = [element(measure), figure.querySelector(".missing")];
  const rows = rowsOf(grid, measure);
  const scale = scaleOf(measure, rows);
  const bad = rowsOf(grid, "state").some((row) => row.includes(NOT_FINITE));
  figure.hidden = grid.kind === "gemm" && measure !== "sqnr";
  const nothing = measure === "saturation" && rows.every((row) => row.every((value) => !(value > 0)));
  note.hidden = !nothing && (scale !== null || bad);
  chart.hidden = !note.hidden;
  note.textContent = nothing ? "No element was clamped." : "No value was recorded.";
  if (chart.hidden || figure.hidden) return;
  const height = Math.min(Math.max(70 + 15 * grid.layers.length, 180), 900);
  const changes = {
    margin: { l: 10, r: 116, t: 10, b: 10 },
    plot_bgcolor: color("empty"),
    xaxis: { showgrid: false },
    yaxis: { type: "category", autorange: "reversed", showgrid: false, tickfont: { size: 11 } },
  };
  const traces = heatTraces(grid, measure, rows, scale ?? { low: 1, high: 10 });
  Plotly.react(chart, traces, layout(height, changes), CONFIG);
  chart.removeAllListeners("plotly_click");
  chart.on("plotly_click", (event) => {
    element("layer").value = String(event.points[0].pointIndex[0]);
    layerChanged();
  });
}

function drawAmax(grid, chosen) {
  element("amax-figure").hidden = grid.kind === "gemm";
  if (grid.kind === "gemm") return;
  const rows = rowsOf(grid, "amax");
  const columns = grid.last.map((_, column) =>
    rows
      .map((row) => row[column])
      .filter((value) => Number.isFinite(value) && value > 0)
      .sort((one, other) => one - other),
  );
  const at = (part) =>
    columns.map((values) => values[Math.floor(part * (values.length - 1))] ?? null);
  const trace = (name, y, changes) => ({
    type: "scatter",
    mode: "lines",
    name,
    x: grid.last,
    y,
    hovertext: grid.steps,
    hovertemplate: `${name}<br>%{hovertext}<br>amax %{y:.4~g}<extra></extra>`,
    ...changes,
  });
  // A fill doesn't end where its edges have a gap.
  const edge = { connectgaps: true, line: { color: color("soft"), width: 0.8 } };
  const of = grid.layers.length;
  const own = Array.from(rows[chosen], (value) => (value > 0 && Number.isFinite(value) ? value : null));
  const traces = [
    trace(`smallest of ${of} layers`, at(0), { ...edge, showlegend: false }),
    trace(`largest of ${of} layers`, at(1), {
      ...edge,
      name: `smallest to largest of ${of} layers`,
      fill: "tonexty",
      fillcolor: color("band"),
    }),
    trace("median layer", at(0.5), { line: { color: color("soft"), width: 1.4, dash: "dot" } }),
    trace(escaped(grid.labels[chosen]), own, {
      mode: own.length > 30 ? "lines" : "lines+markers",
      line: { color: color("second"), width: 2.2 },
    }),
  ];
  const changes = {
    yaxis: logAxis("amax", columns.flatMap((values) => [values[0], values.at(-1)])),
    shapes: bandsOf([], [], data.anomalies),
    showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "closest",
  };
  Plotly.react("amax-lines", traces, layout(300, changes), CONFIG);
}

function option(text, value) {
  const made = new Option(text, value);
  made.title = text;
  return made;
}

function currentGrid() {
  return data.grids[Number(element("grid").value)];
}

function gridChanged() {
  const layer = element("layer");
  const before = layer.selectedOptions[0]?.text;
  const grid = currentGrid();
  layer.replaceChildren(...grid.layers.map((name, index) => option(name, index)));
  layer.value = String(Math.max(grid.layers.indexOf(before), 0));
  for (const measure of Object.keys(MEASURES)) drawHeat(grid, measure);
  layerChanged();
}

function layerChanged() {
  const grid = currentGrid();
  drawAmax(grid, Number(element("layer").value));
  const place = new URLSearchParams({
    of: element("grid").value,
    layer: grid.layers[Number(element("layer").value)],
  });
  history.replaceState(null, "", `#${place}`);
}

// A link to the page can name what is shown: #of=1&layer=layers.0.attention.wq
function readPlace() {
  const place = new URLSearchParams(location.hash.slice(1));
  const of = Number(place.get("of"));
  element("grid").value = String(of in data.grids ? of : 0);
  gridChanged();
  const layer = currentGrid().layers.indexOf(place.get("layer"));
  if (layer > 0) {
    element("layer").value = String(layer);
    layerChanged();
  }
}

function drawLines() {
  for (const name of Object.keys(LINES)) {
    if (element(name) === null) continue;
    if (data.lines[name].x) drawLine(name);
    else missingLine(name);
  }
}

drawLines();
if (data.grids.length) {
  element("grid").replaceChildren(...data.grids.map((grid, index) => option(grid.label, index)));
  element("grid").addEventListener("change", gridChanged);
  element("layer").addEventListener("change", layerChanged);
  addEventListener("hashchange", readPlace);
  readPlace();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawLines();
  if (data.grids.length) gridChanged();
});
