"use strict";
// Draws the timeline that the page carries as JSON, and lets one zoom, move and ask.
const timeline = taken(JSON.parse(document.getElementById("timeline").textContent));
const canvas = document.getElementById("picture");
const tip = document.getElementById("tip");
const pen = canvas.getContext("2d");

const ROW = 24, CURVE = 26, GAP = 8, LEFT = 74, TOP = 8, AXIS = 26, RIGHT = 12, DIGIT = 6.2;
const LANE = ROW + CURVE + GAP;
const INK = "#222", FAINT = "#bbb", AREA = "#cfd8e6", EDGE = "#51627d";
const FONT = 'px Helvetica, Arial, "DejaVu Sans", sans-serif';

let from = 0, to = timeline.end;  // the time in view
let pointed = null;               // the cell under the pointer

const width = () => canvas.clientWidth - LEFT - RIGHT;
const xOf = (time) => LEFT + ((time - from) / (to - from)) * width();
const timeOf = (x) => from + ((x - LEFT) / width()) * (to - from);
const yOf = (rank) => TOP + rank * LANE;
const short = (value) => String(Number(value.toPrecision(6)));

// The timeline with its lists taken apart, in the order in which page.py writes them.
function taken({ end, unit, styles, ranks }) {
  const part = ([style, text, small]) => ({ fill: styles[style][0], ink: styles[style][1], text, small });
  const cell = ([start, end, token, parts, why, cause]) => ({ start, end, token, parts: parts.map(part), why, cause });
  const lanes = ranks.map(({ name, cells, steps, stash, peak }) => ({ name, cells: cells.map(cell), steps, stash, peak }));
  let digits = 1;
  for (const lane of lanes) for (const { parts } of lane.cells) for (const { text } of parts) digits = Math.max(digits, text.length);
  return { end: end || 1, unit, ranks: lanes, digits, most: Math.max(...lanes.map(({ peak }) => peak)) };
}

// The index of the first entry for which `holds` is true; entries must turn from false to true once.
function firstOf(entries, holds) {
  let low = 0, high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(entries[middle])) high = middle; else low = middle + 1;
  }
  return low;
}

function draw() {
  const height = yOf(timeline.ranks.length) + AXIS, ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.clientWidth, height);
  timeline.ranks.forEach(drawName);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT - 5, 0, width() + 10, height);
  pen.clip();
  timeline.ranks.forEach(drawRank);
  if (pointed) drawPointed();
  pen.restore();
  drawAxis(yOf(timeline.ranks.length));
}

function drawName(rank, index) {
  write(rank.name, 0, yOf(index) + ROW / 2 + 4, 12, INK, "left");
  write(`peak ${short(rank.peak)}`, 0, yOf(index) + ROW + CURVE / 2 + 6, 10, "#666", "left");
}

function drawRank(rank, index) {
  const y = yOf(index);
  pen.fillStyle = "#fff";
  pen.strokeStyle = FAINT;
  pen.lineWidth = 1;
  pen.strokeRect(xOf(0), y, xOf(timeline.end) - xOf(0), ROW);
  for (let i = firstOf(rank.cells, (cell) => cell.end > from); i < rank.cells.length && rank.cells[i].start < to; i++) {
    drawCell(rank.cells[i], y);
  }
  drawCurve(rank.stash, y + ROW + 2);
  for (const [time] of rank.steps) drawStep(xOf(time), y);
}

function drawCell(cell, y) {
  const x = xOf(cell.start), size = xOf(cell.end) - x, share = size / cell.parts.length;
  if (!cell.parts.length) {
    pen.fillStyle = FAINT;
    pen.fillRect(x, y, size, ROW);
  }
  cell.parts.forEach((part, place) => {
    const left = x + place * share;
    pen.fillStyle = part.fill;
    pen.fillRect(left, y, share, ROW);
    const needed = timeline.digits * DIGIT;
    if (needed + 2 > share) return;
    write(part.text, left + share / 2, y + ROW / 2 + 4, 11, part.ink, "center");
    if (needed / 2 + part.small.length * 5 + 4 <= share / 2) write(part.small, left + share - 2, y + 9, 8, part.ink, "right");
  });
  if (size > 3) outline(x, y, size, cell.parts.length > 1 ? 2 : 0.6, INK);
}

function drawPointed() {
  const y = yOf(pointed.rank), x = xOf(pointed.cell.start);
  outline(x, y, xOf(pointed.cell.end) - x, 3, "#d00");
  if (!pointed.cell.cause) return;
  const [rank, index] = pointed.cell.cause, cause = timeline.ranks[rank].cells[index];
  const causeY = yOf(rank), end = xOf(cause.end);
  outline(xOf(cause.start), causeY, end - xOf(cause.start), 3, "#d00");
  pen.beginPath();
  pen.moveTo(end, causeY + ROW / 2);
  pen.lineTo(x, y + ROW / 2);
  pen.stroke();
}

function drawCurve(stash, top) {
  const bottom = top + CURVE, scale = (CURVE - 3) / (timeline.most || 1);
  pen.beginPath();
  pen.moveTo(xOf(0), bottom);
  let level = 0;
  for (const [time, held] of stash) {
    pen.lineTo(xOf(time), bottom - level * scale);
    pen.lineTo(xOf(time), bottom - held * scale);
    level = held;
  }
  pen.lineTo(xOf(timeline.end), bottom - level * scale);
  pen.lineTo(xOf(timeline.end), bottom);
  pen.closePath();
  pen.fillStyle = AREA;
  pen.fill();
  pen.strokeStyle = EDGE;
  pen.lineWidth = 1;
  pen.stroke();
}

function drawStep(x, y) {
  pen.fillStyle = INK;
  pen.fillRect(x - 0.8, y - 1, 1.6, ROW + 1);
  pen.beginPath();
  pen.moveTo(x - 4, y - 4);
  pen.lineTo(x + 4, y - 4);
  pen.lineTo(x, y + 4);
  pen.fill();
}

function drawAxis(y) {
  const least = ((to - from) * 60) / width(), power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least * (1 - 1e-9));
  pen.strokeStyle = INK;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(LEFT, y);
  pen.lineTo(LEFT + width(), y);
  for (let index = Math.ceil(from / step - 1e-9); index * step <= to * (1 + 1e-9); index++) {
    pen.moveTo(xOf(index * step), y);
    pen.lineTo(xOf(index * step), y + 5);
    write(short(index * step), xOf(index * step), y + 17, 11, INK, "center");
  }
  pen.stroke();
  write("time", 0, y + 17, 11, INK, "left");
}

function outline(x, y, size, line, color) {
  pen.strokeStyle = color;
  pen.lineWidth = line;
  pen.strokeRect(x, y, size, ROW);
}

function write(words, x, y, size, color, align) {
  pen.font = size + FONT;
  pen.fillStyle = color;
  pen.textAlign = align;
  pen.fillText(words, x, y);
}

// Zoom by a factor around a moment, never further out than the whole.
function zoom(factor, middle) {
  const span = Math.min(Math.max((to - from) * factor, timeline.end / 1e4), timeline.end);
  show(middle - ((middle - from) * span) / (to - from), span);
}

function show(start, span) {
  from = Math.min(Math.max(start, 0), timeline.end - span);
  to = from + span;
  draw();
}

function told(rank, time, onCurve) {
  const lane = timeline.ranks[rank];
  if (onCurve) {
    const after = firstOf(lane.stash, ([moment]) => moment > time);
    const held = after ? lane.stash[after - 1][1] : 0;
    return `${lane.name} at ${short(time)}\nholds ${short(held)} of at most ${short(lane.peak)} ${timeline.unit}`;
  }
  const cell = pointed && pointed.cell;
  if (!cell) return "";
  const took = `${short(cell.start)} to ${short(cell.end)} (${short(cell.end - cell.start)})`;
  return [`${cell.token} on ${lane.name}`, took, cell.why].filter(Boolean).join("\n");
}

function point(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const rank = Math.floor((y - TOP) / LANE), time = timeOf(x), inside = y - yOf(rank);
  const lane = x >= LEFT && time <= timeline.end && time >= 0 ? timeline.ranks[rank] : undefined;
  pointed = null;
  let words = "";
  if (lane && inside <= ROW + CURVE) {
    const cell = lane.cells[firstOf(lane.cells, ({ end }) => end > time)];
    if (inside <= ROW && cell && cell.start <= time) pointed = { rank, cell };
    words = told(rank, time, inside > ROW);
  }
  tip.hidden = !words;
  tip.textContent = words;
  tip.style.left = `${Math.max(Math.min(x + 14, box.width - tip.offsetWidth - 4), 0)}px`;
  tip.style.top = `${y + 18}px`;
  draw();
}

let grip = null;  // where a drag began, and what was in view then
canvas.addEventListener("pointerdown", (event) => {
  grip = { x: event.clientX, from };
  tip.hidden = true;
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("dragged");
});
for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, () => {
    grip = null;
    canvas.classList.remove("dragged");
  });
}
canvas.addEventListener("pointermove", (event) => {
  if (grip) show(grip.from - ((event.clientX - grip.x) / width()) * (to - from), to - from);
  else point(event);
});
canvas.addEventListener("pointerleave", () => {
  tip.hidden = true;
  pointed = null;
  draw();
});
canvas.addEventListener("wheel", (event) => {
  const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
  if (event.ctrlKey || event.metaKey) zoom(1.0015 ** event.deltaY, timeOf(event.offsetX));
  else if (sideways) show(from + (sideways / width()) * (to - from), to - from);
  else return;
  event.preventDefault();
}, { passive: false });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;  // the browser's own
  const span = to - from;
  if (event.key === "+" || event.key === "=") zoom(1 / 1.5, (from + to) / 2);
  else if (event.key === "-") zoom(1.5, (from + to) / 2);
  else if (event.key === "0") show(0, timeline.end);
  else if (event.key === "ArrowLeft") show(from - span / 8, span);
  else if (event.key === "ArrowRight") show(from + span / 8, span);
  else return;
  event.preventDefault();
});
document.getElementById("closer").addEventListener("click", () => zoom(1 / 1.5, (from + to) / 2));
document.getElementById("farther").addEventListener("click", () => zoom(1.5, (from + to) / 2));
document.getElementById("whole").addEventListener("click", () => show(0, timeline.end));
window.addEventListener("resize", draw);
draw();
