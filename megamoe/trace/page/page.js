"use strict";
const META = JSON.parse(document.getElementById("meta").textContent);
const $ = (id) => document.getElementById(id);
const canvas = $("canvas"), pen = canvas.getContext("2d"), tip = $("tip");
const LANES = META.lanes.length, ROWS = LANES + META.sms, NONE = 65535;
const COLOURS = META.kinds.map((k) => k.colour);
const LANE_KIND = META.kinds.map((k) => META.lane_kinds.includes(k.key));
const MATH = META.kinds.map((k) => k.key === "l1" || k.key === "l2");
const EXPERTS = ["#332288", "#DDCC77", "#44AA99", "#882255", "#88CCEE", "#999933", "#AA4499", "#117733"];
const GUTTER = 92, AXIS = 26, STRIP = 20, LANE = 16, GAP = 10, BAND = 27;
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
let rank = 0, byExpert = false, from = 0, to = META.total_ns, data = null, width = 0, waves = [];

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const first = new Uint32Array(buffer, 0, META.ranks * ROWS + 1), num = first[first.length - 1];
  let at = first.byteLength;
  const take = (type) => { const a = new type(buffer, at, num); at += a.byteLength; return a; };
  const gap = take(Uint32Array), time = take(Uint32Array);
  const [wave, expert, m, n] = [0, 1, 2, 3].map(() => take(Uint16Array));
  const kind = take(Uint8Array), start = new Float64Array(num);
  for (let row = 0; row + 1 < first.length; row++)
    for (let i = first[row], last = 0; i < first[row + 1]; i++) { start[i] = last + gap[i]; last = start[i] + time[i]; }
  return { first, start, time, wave, expert, m, n, kind };
}

function findWaves(which) {
  const found = [], d = data;
  for (let i = d.first[which * ROWS + LANES]; i < d.first[(which + 1) * ROWS]; i++) {
    if (!MATH[d.kind[i]]) continue;
    const w = (found[d.wave[i]] ??= { start: Infinity, end: 0, low: NONE, high: 0, blocks: 0 });
    w.start = Math.min(w.start, d.start[i]); w.end = Math.max(w.end, d.start[i] + d.time[i]);
    w.low = Math.min(w.low, d.expert[i]); w.high = Math.max(w.high, d.expert[i]); w.blocks++;
  }
  return found;
}

const smHeight = () => Math.max(2, Math.min(8, 330 / META.sms));
const smTop = (sm) => Math.round(top0() + sm * smHeight());
const top0 = () => AXIS + STRIP + LANES * LANE + 4;
const bottom0 = () => top0() + META.sms * smHeight();
const others = () => [...Array(META.ranks).keys()].filter((r) => r !== rank);
const height = () => bottom0() + (META.ranks > 1 ? GAP + others().length * BAND : 0) + 4;
const x = (ns) => GUTTER + ((ns - from) / (to - from)) * (width - GUTTER);
const us = (ns, digits = 1) => (ns / 1000).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " us";
const colour = (i) => byExpert && MATH[data.kind[i]] ? EXPERTS[data.expert[i] % EXPERTS.length] : COLOURS[data.kind[i]];

function lower(row, ns) {           // first span of the row that ends after ns
  let a = data.first[row], b = data.first[row + 1];
  while (a < b) { const c = (a + b) >> 1; data.start[c] + data.time[c] <= ns ? (a = c + 1) : (b = c); }
  return a;
}

function drawRow(row, y, h, edge = 0) {
  for (let i = lower(row, from), end = data.first[row + 1]; i < end && data.start[i] < to; i++) {
    const a = Math.max(x(data.start[i]), GUTTER), b = Math.min(x(data.start[i] + data.time[i]), width);
    pen.fillStyle = colour(i);
    pen.globalAlpha = byExpert && META.kinds[data.kind[i]].key === "l2" ? 0.55 : 1;
    pen.fillRect(a, y, Math.max(b - a - (b - a > 3 ? edge : 0), 0.4), h - edge);
  }
  pen.globalAlpha = 1;
}

function sharesOf(which, columns) {  // [kind][column]: share of the rank's SMs
  const out = META.kinds.map(() => new Float32Array(columns)), scale = columns / (to - from);
  for (let row = which * ROWS + LANES; row < (which + 1) * ROWS; row++)
    for (let i = lower(row, from), end = data.first[row + 1]; i < end && data.start[i] < to; i++) {
      const a = Math.max((data.start[i] - from) * scale, 0), b = Math.min((data.start[i] + data.time[i] - from) * scale, columns);
      for (let c = Math.floor(a); c < b; c++) out[data.kind[i]][c] += (Math.min(b, c + 1) - Math.max(a, c)) / META.sms;
    }
  return out;
}

function drawBand(which, y) {
  const columns = Math.max(1, Math.floor((width - GUTTER) / 2)), shares = sharesOf(which, columns), h = BAND - 12;
  for (let c = 0; c < columns; c++) {
    let up = y + 6 + h;
    for (let k = 0; k < shares.length; k++) {
      const part = shares[k][c] * h;
      if (part < 0.05) continue;
      pen.fillStyle = COLOURS[k]; pen.fillRect(GUTTER + c * 2, up - part, 2, part); up -= part;
    }
  }
  drawRow(which * ROWS, y, 3.6); drawRow(which * ROWS + 1, y + 6 + h + 1, 3.6);
}

function label(text, y, bold) {
  pen.font = (bold ? "600 " : "") + FONT; pen.fillStyle = bold ? "#1c2430" : "#5b6676";
  pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillText(text, GUTTER - 9, y);
}

function drawAxis() {
  const span = (to - from) / 1000, rough = span / 8, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((s) => s * ten).find((s) => s >= rough);
  pen.font = FONT; pen.textBaseline = "middle"; pen.textAlign = "center";
  for (let t = Math.ceil(from / 1000 / step) * step; t <= to / 1000; t += step) {
    const at = x(t * 1000);
    pen.fillStyle = "#e6eaf0"; pen.fillRect(at, AXIS - 4, 1, height() - AXIS);
    pen.fillStyle = "#5b6676";
    const text = t.toLocaleString("en", { maximumFractionDigits: 3 }), half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(at, GUTTER + half), width - half), 9);
  }
  label("time in us", 9);
}

function drawWaves() {
  label("waves", AXIS + STRIP / 2 - 2);
  pen.font = FONT; pen.textAlign = "center"; pen.textBaseline = "middle";
  waves.forEach((w, i) => {
    const next = waves.slice(i + 1).find(Boolean), end = next ? next.start : w.end;
    const a = Math.max(x(w.start), GUTTER), b = Math.min(x(end), width);
    if (b <= a) return;
    pen.fillStyle = i % 2 ? "#cfd6e0" : "#e6eaf0"; pen.fillRect(a, AXIS, b - a, STRIP - 5);
    const text = b - a > 70 ? `wave ${i}` : `${i}`;
    pen.fillStyle = "#1c2430";
    if (b - a > pen.measureText(text).width + 3) pen.fillText(text, (a + b) / 2, AXIS + STRIP / 2 - 2);
    pen.strokeStyle = "#1c243059"; pen.lineWidth = 1; pen.setLineDash([2, 3]); pen.beginPath();
    if (x(w.start) >= GUTTER) { pen.moveTo(a, AXIS + STRIP - 5); pen.lineTo(a, bottom0()); }
    pen.stroke(); pen.setLineDash([]);
  });
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  width = canvas.parentElement.clientWidth;
  canvas.width = width * ratio; canvas.height = height() * ratio; canvas.style.height = height() + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height());
  drawAxis();
  META.lanes.forEach((name, lane) => {
    const y = AXIS + STRIP + lane * LANE;
    pen.fillStyle = "#f6f8fa"; pen.fillRect(GUTTER, y, width - GUTTER, LANE - 3);
    drawRow(rank * ROWS + lane, y, LANE - 3); label(name, y + LANE / 2 - 1);
  });
  pen.fillStyle = "#f6f8fa"; pen.fillRect(GUTTER, top0(), width - GUTTER, META.sms * smHeight());
  for (let sm = 0; sm < META.sms; sm++) drawRow(rank * ROWS + LANES + sm, smTop(sm), smTop(sm + 1) - smTop(sm), 0.6);
  drawWaves();
  const middle = (top0() + bottom0()) / 2;
  label("SM 0", top0() + 6); label(`rank ${rank}`, middle - 8, true); label(`${META.sms} SMs`, middle + 8); label(`SM ${META.sms - 1}`, bottom0() - 6);
  others().forEach((which, i) => {
    const y = bottom0() + GAP + i * BAND;
    drawBand(which, y); label(`rank ${which}`, y + BAND / 2 - 1);
  });
}

function blockText(i, place) {
  const d = data, k = META.kinds[d.kind[i]], rows = [`<b>${k.name}</b>`, `<em>${k.about}</em>`, place];
  if (d.expert[i] !== NONE) rows.push(`expert ${d.expert[i]}` + (d.m[i] !== NONE ? `, row block m ${d.m[i]}` : "") + (d.n[i] !== NONE ? `, weight block n ${d.n[i]}` : ""));
  if (d.wave[i] !== NONE) rows.push(`wave ${d.wave[i]}`);
  rows.push(`starts at ${us(d.start[i], 2)}, takes ${us(d.time[i], 2)}`);
  return rows.join("<br>");
}

function textAt(px, py) {
  if (px < GUTTER || px > width) return "";
  const ns = from + ((px - GUTTER) / (width - GUTTER)) * (to - from);
  const inRow = (row, place) => { const i = lower(row, ns); return i < data.first[row + 1] && data.start[i] <= ns ? blockText(i, place) : ""; };
  if (py >= AXIS && py < AXIS + STRIP - 4) {
    const i = waves.findLastIndex((w) => w && w.start <= ns), w = waves[i];
    return w ? `<b>wave ${i}</b><br>experts ${w.low} to ${w.high}, ${w.blocks} blocks<br>first block at ${us(w.start)}, last ends at ${us(w.end)}` : "";
  }
  const lane = Math.floor((py - AXIS - STRIP) / LANE);
  if (py < top0()) return lane >= 0 && lane < LANES ? inRow(rank * ROWS + lane, `rank ${rank}, links`) : "";
  if (py < bottom0()) { const sm = Math.floor((py - top0()) / smHeight()); return inRow(rank * ROWS + LANES + sm, `rank ${rank}, SM ${sm}`); }
  const which = others()[Math.floor((py - bottom0() - GAP) / BAND)];
  if (which === undefined) return "";
  const a = from, b = to; from = ns - (b - a) / 400; to = ns + (b - a) / 400;
  const shares = sharesOf(which, 1); from = a; to = b;
  const rows = META.kinds.map((k, i) => [k.name, shares[i][0]]).filter((r) => r[1] > 0.005).sort((p, q) => q[1] - p[1]);
  return `<b>rank ${which}</b> near ${us(ns)}<br>` + rows.map((r) => `${Math.round(r[1] * 100)}% ${r[0]}`).join("<br>") + "<br><em>click to open this rank</em>";
}

function hover(event) {
  const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  const text = textAt(px, py);
  tip.hidden = !text;
  if (!text) return;
  tip.innerHTML = text;
  tip.style.left = Math.max(0, px + 16 + tip.offsetWidth > width ? px - tip.offsetWidth - 14 : px + 16) + "px";
  tip.style.top = Math.max(0, Math.min(py + 14, height() - tip.offsetHeight - 4)) + "px";
}

function zoom(factor, at = (from + to) / 2) {
  const span = Math.min(Math.max((to - from) * factor, 500), META.total_ns), share = (at - from) / (to - from);
  from = Math.min(Math.max(at - share * span, 0), META.total_ns - span); to = from + span; draw();
}

function choose(which) {
  rank = which; waves = findWaves(rank);
  [...$("ranks").querySelectorAll("button")].forEach((b, i) => b.classList.toggle("on", i === rank)); draw();
}

function paint(expert) {
  byExpert = expert; $("by-expert").classList.toggle("on", expert); $("by-role").classList.toggle("on", !expert); legend(); draw();
}

function legend() {
  const used = new Set(data.kind), chip = (c, text, about) => `<span title="${about}"><i style="background:${c}"></i>${text}</span>`;
  const kinds = META.kinds.filter((k, i) => used.has(i) && !(byExpert && MATH[i]));
  const experts = byExpert ? EXPERTS.map((c, i) => chip(c, i === 0 ? "expert 0, 8, 16, …" : `${i}, …`, "eight colours in turn; L2 is paler")) : [];
  $("legend").innerHTML = [...experts, ...kinds.map((k) => chip(k.colour, k.name, k.about))].join("");
}

function listen() {
  let held = null;
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const px = Math.max(e.clientX - canvas.getBoundingClientRect().left, GUTTER);
    zoom(e.deltaY > 0 ? 1.25 : 0.8, from + ((px - GUTTER) / (width - GUTTER)) * (to - from));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (e) => { held = { x: e.clientX, from, moved: false }; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    if (!held) return hover(e);
    if (Math.abs(e.clientX - held.x) < 3 && !held.moved) return;
    held.moved = true; tip.hidden = true;
    const span = to - from, by = ((held.x - e.clientX) / (width - GUTTER)) * span;
    from = Math.min(Math.max(held.from + by, 0), META.total_ns - span); to = from + span; draw();
  });
  canvas.addEventListener("pointerup", (e) => {
    const y = e.clientY - canvas.getBoundingClientRect().top;
    const which = others()[Math.floor((y - bottom0() - GAP) / BAND)];
    if (held && !held.moved && y > bottom0() + GAP && which !== undefined) choose(which);
    held = null;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => zoom(1e9));
  window.addEventListener("resize", draw);
  window.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: -0.2, ArrowRight: 0.2 }[e.key];
    if (by) { const span = to - from; from = Math.min(Math.max(from + by * span, 0), META.total_ns - span); to = from + span; draw(); }
    if (e.key === "+") zoom(0.6);
    if (e.key === "-") zoom(1.6);
  });
  $("in").onclick = () => zoom(0.5); $("out").onclick = () => zoom(2); $("reset").onclick = () => zoom(1e9);
  $("by-role").onclick = () => paint(false); $("by-expert").onclick = () => paint(true);
}

unpack($("spans").textContent).then((found) => {
  data = found; waves = findWaves(rank);
  if (META.ranks > 1) $("ranks").innerHTML = "rank " + [...Array(META.ranks).keys()].map((r) => `<button>${r}</button>`).join("");
  [...$("ranks").querySelectorAll("button")].forEach((b, i) => { b.onclick = () => choose(i); });
  if (META.left_out) { $("left-out").hidden = false; $("left-out").textContent = `${META.left_out} more ranks were simulated and left out of this page to keep it small; trace.json has them all.`; }
  legend(); choose(0); listen();
}).catch((error) => { $("legend").textContent = "This page needs a browser from 2023 or later (DecompressionStream): " + error; });
