"use strict";
// The page of a traced model: boxes that open and close. Each open box is laid out by itself when it is first drawn, so a
// click costs the layout of that box and of those around it, whatever the size of the model.

const program = JSON.parse(document.getElementById("program").textContent);
const boxes = program.boxes;                       // outer before inner; `children` are positions in this list
boxes.forEach((box, id) => { box.id = id; box.children.forEach((c) => { boxes[c].around = id; }); });
const byKey = new Map(boxes.map((box) => [box.key, box]));
const open = new Set([0]);
let selected = null;
const isAlone = window.parent === window;          // not one of the two pages of a comparison

const HEAD = 24, PAD = 14, LINE = 15, MANY = 500;  // more children than MANY are a column: no layout of a graph is readable then
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
function width(text, size) {
  const key = size + text;
  if (!widths.has(key)) { pen.font = size + "px system-ui, sans-serif"; widths.set(key, pen.measureText(text).width); }
  return widths.get(key);
}
const cut = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);

// ---- layout: box -> its size, with the places of its children, ports and edges

const layouts = new Map();
function forget(id) { for (let at = id; at !== undefined; at = boxes[at].around) layouts.delete(at); }
const isOpen = (box) => open.has(box.id) && box.children.length > 0;

function size(box) {
  if (isOpen(box)) return layout(box);
  const w = Math.max(width(cut(box.label, 60), 12), ...box.notes.map(([, text]) => width(cut(text, 44), 10))) + 28;
  return { width: Math.max(w, 50), height: 12 + LINE * (1 + box.notes.length) };
}

function layout(box) {
  if (!layouts.has(box.id)) layouts.set(box.id, box.children.length > MANY ? column(box) : layered(box));
  return layouts.get(box.id);
}

function port(name, type) { return { width: Math.max(width(name, 12), width(type, 10)) + 20, height: 34, name, type }; }

// The ports of a box by their ends, "i0" or "o2". The many tensors of one container, as of a cache, share one port.
function ends(box) {
  const nodes = new Map();
  for (const [side, ports] of [["i", box.inputs], ["o", box.outputs]]) {
    const around = ports.map(([name]) => name.split(/\[\d|\.\d/)[0]);
    ports.forEach(([name, type], k) => {
      const first = around.indexOf(around[k]), count = around.filter((a) => a === around[k]).length;
      if (count <= 3) nodes.set(side + k, port(name, type));
      else nodes.set(side + k, nodes.get(side + first) || port(around[k] + "[…]", count + " tensors, " + type));
    });
  }
  return nodes;
}

function layered(box) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ nodesep: 18, ranksep: 34, edgesep: 10 });
  graph.setDefaultEdgeLabel(() => ({}));
  const ports = ends(box);
  const end = (name) => [...ports.keys()].find((first) => ports.get(first) === ports.get(name));
  const used = new Set();
  const wires = new Map();
  for (const [child, slot, target, into, type] of box.edges) {
    if (box.kind === "run" && child < 0 && target > 0) continue;  // what all members take is drawn to the first
    const from = child < 0 ? end("i" + slot) : "c" + child, to = target < 0 ? end("o" + into) : "c" + target;
    used.add(from).add(to);
    const wire = from + " " + to;
    wires.set(wire, [...(wires.get(wire) || []), child < 0 || target < 0 ? "" : type]);  // a port has its type in it
  }
  box.children.forEach((id, k) => graph.setNode("c" + k, { ...size(boxes[id]), child: id }));
  ports.forEach((node, name) => { if (used.has(name)) graph.setNode(name, node); });
  wires.forEach((types, wire) => {
    const label = types[0] && types[0] + (types.length > 1 ? " +" + (types.length - 1) : "");
    graph.setEdge(...wire.split(" "), label ? { label, width: width(label, 10) + 8, height: 12, labelpos: "r", labeloffset: 4 } : {});
  });
  dagre.layout(graph);
  const edges = graph.edges().map((e) => ({ ...graph.edge(e) }));
  return framed(box, graph.nodes().map((n) => graph.node(n)).filter(Boolean), edges, graph.graph());
}

function column(box) {
  let y = 0, widest = 0;
  const nodes = box.children.map((id) => {
    const node = { ...size(boxes[id]), child: id };
    node.y = y + node.height / 2; y += node.height + 8; widest = Math.max(widest, node.width);
    return node;
  });
  nodes.forEach((node) => { node.x = widest / 2; });
  return framed(box, nodes, [], { width: widest, height: y });
}

function framed(box, nodes, edges, inner) {
  const head = width(cut(box.label, 80), 12) + 40;
  const shift = Math.max(0, head - inner.width) / 2;
  return { nodes, edges, shift, width: Math.max(inner.width, head) + 2 * PAD, height: inner.height + HEAD + 2 * PAD };
}

// ---- drawing

const NS = "http://www.w3.org/2000/svg";
function draw(parent, tag, attributes, text) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

const canvas = document.getElementById("canvas");
const view = document.getElementById("view");
const placed = new Map();                          // id -> the middle of the box on the plane, and its element

function render() {
  view.textContent = "";
  placed.clear();
  const { width: w, height: h } = size(boxes[0]);
  drawBox(view, boxes[0], w / 2, h / 2, w, h, 0, 0);
}

function drawBox(parent, box, x, y, w, h, left, top) {
  const kind = box.kind + (isOpen(box) ? " open" : "") + (box.notes.some(([of]) => of === "writes") ? " writes" : "") + (box === selected ? " selected" : "") + (box.differs ? " " + box.differs : "");
  const group = draw(parent, "g", { class: "box " + kind, transform: `translate(${x - w / 2},${y - h / 2})` });
  placed.set(box.id, { x: left + x, y: top + y, w, h, group });
  const rect = draw(group, "rect", { width: w, height: h });
  rect.addEventListener("click", (event) => { event.stopPropagation(); if (!moved) { select(box); if (box.children.length) toggle(box); tell(box); } });
  draw(rect, "title", {}, [box.text || box.key, ...box.notes.map(([, text]) => text)].join("\n"));
  const sign = box.children.length ? (isOpen(box) ? "▾ " : "▸ ") : "";
  if (!isOpen(box)) {
    draw(group, "text", { x: w / 2, y: 17, "text-anchor": "middle" }, sign + cut(box.label, 60));
    box.notes.forEach(([of, text], k) => {
      draw(group, "text", { x: w / 2, y: 17 + LINE * (k + 1), "text-anchor": "middle", class: "note " + of }, cut(text, 44));
    });
    return;
  }
  draw(group, "text", { x: 10, y: 17 }, sign + cut(box.label, 80));
  const { nodes, edges, shift } = layout(box);
  const dx = PAD + shift, dy = PAD + HEAD;
  const inner = draw(group, "g", { transform: `translate(${dx},${dy})` });
  for (const edge of edges) drawEdge(inner, edge);
  for (const node of nodes) {
    if (node.child !== undefined) {
      drawBox(inner, boxes[node.child], node.x, node.y, node.width, node.height, left + x - w / 2 + dx, top + y - h / 2 + dy);
    } else drawPort(inner, node);
  }
}

function drawPort(parent, node) {
  const group = draw(parent, "g", { class: "port", transform: `translate(${node.x - node.width / 2},${node.y - node.height / 2})` });
  draw(group, "rect", { width: node.width, height: node.height });
  draw(group, "text", { x: node.width / 2, y: 14, "text-anchor": "middle" }, node.name);
  draw(group, "text", { x: node.width / 2, y: 28, "text-anchor": "middle", class: "note" }, node.type);
}

function drawEdge(parent, edge) {
  const [first, ...rest] = edge.points;
  const last = rest.pop();
  let path = `M${first.x},${first.y}`;
  rest.forEach((p, k) => {
    const next = rest[k + 1] || last;
    path += ` Q${p.x},${p.y} ${(p.x + next.x) / 2},${(p.y + next.y) / 2}`;
  });
  draw(parent, "path", { class: "edge", d: `${path} L${last.x},${last.y}` });
  if (edge.label) draw(parent, "text", { x: edge.x, y: edge.y + 4, "text-anchor": "middle", class: "note type" }, edge.label);
}

// ---- opening, selecting, searching

function toggle(box) {
  const before = placed.get(box.id);
  if (open.has(box.id)) open.delete(box.id); else open.add(box.id);
  forget(box.id);
  render();
  const after = placed.get(box.id);                // the box stays where it is on the screen
  if (before && after) { at.x += (before.x - before.w / 2 - after.x + after.w / 2) * at.scale; at.y += (before.y - before.h / 2 - after.y + after.h / 2) * at.scale; }
  place();
}

function select(box) {
  const mark = (at, isOn) => [placed.get(at.id)?.group, rows.get(at.id)].forEach((node) => node?.classList.toggle("selected", isOn));
  if (selected) mark(selected, false);
  selected = box;
  mark(box, true);
  rows.get(box.id)?.scrollIntoView({ block: "nearest" });
  if (isAlone) history.replaceState(null, "", "#" + encodeURIComponent(box.key));
  describe(box);
}

function reveal(box) {
  const outside = [];
  for (let around = box.around; around !== undefined; around = boxes[around].around) outside.unshift(around);
  for (const around of outside) {
    if (!open.has(around)) { open.add(around); layouts.delete(around); }
    const node = rows.get(around)?.closest("details");
    if (node && !node.open) { node.open = true; node.dispatchEvent(new Event("toggle")); }
  }
  forget(box.id);
  render();
  select(box);
  const where = placed.get(box.id);
  at.scale = Math.max(at.scale, 0.6);
  at.x = canvas.clientWidth / 2 - where.x * at.scale;
  at.y = canvas.clientHeight / 3 - where.y * at.scale;
  place();
}

// Labels before names and paths, these before the texts of ops; outer boxes first.
const words = boxes.map((box) => [box.label, box.name || "", box.key, box.text || ""].map((word) => word.toLowerCase()));
function find(text) {
  const asked = text.trim().toLowerCase();
  if (!asked) return [];
  const rank = (box) => words[box.id].findIndex((word) => word.includes(asked));
  return boxes.filter((box) => rank(box) >= 0).sort((a, b) => rank(a) - rank(b) || a.id - b.id).slice(0, 50);
}

const search = document.getElementById("search"), hits = document.getElementById("hits");
search.addEventListener("input", () => {
  hits.textContent = "";
  for (const box of find(search.value)) {
    const item = document.createElement("li");
    item.textContent = box.text ? cut(box.text, 90) : box.label;
    const where = document.createElement("small");
    where.textContent = box.key;
    item.appendChild(where);
    item.addEventListener("mousedown", () => { hits.textContent = ""; reveal(box); });
    hits.appendChild(item);
  }
});
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") { const [first] = find(search.value); if (first) { hits.textContent = ""; reveal(first); } }
  if (event.key === "Escape") { search.value = ""; hits.textContent = ""; search.blur(); }
});
search.addEventListener("blur", () => { hits.textContent = ""; });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); }
});

// ---- beside the page of another program: boxes that differ, and what the other page shows

function mark({ kind, scope, text }, k) {
  const is = (box) => (box.kind === "op" ? box.text === text : text.startsWith(box.label + "(")) && box.key.startsWith(scope);
  const first = boxes.find(is) || byKey.get(scope);
  for (let box = first; box; box = boxes[box.around]) {
    box.differs = box === first ? kind : box.differs || "changed";
    if (box !== first && k < 40) open.add(box.id);
  }
}
function tell(box) { if (!isAlone) window.parent.postMessage({ shows: box.key, isOpen: open.has(box.id) }, "*"); }
window.addEventListener("message", ({ data }) => {
  for (let key = data.shows; key; key = key.slice(0, Math.max(0, key.lastIndexOf("/")))) {
    const box = byKey.get(key);
    if (!box) continue;
    if (box.children.length && data.isOpen !== undefined) { if (data.isOpen) open.add(box.id); else open.delete(box.id); }
    return reveal(box);
  }
  if (data.marks) { data.marks.forEach(mark); layouts.clear(); render(); fit(0.6); }
});

// ---- the tree of modules, each with its share of the FLOPs behind its name

const rows = new Map();
function branch(parent, box, depth) {
  const inner = box.children.map((id) => boxes[id]).filter((child) => child.kind !== "op");
  const node = part(inner.length ? "details" : "div", undefined, parent);
  const row = part("span", box.label, inner.length ? part("summary", undefined, node) : node);
  row.style.setProperty("--share", 100 * box.share + "%");
  row.title = `${box.key}, ${(100 * box.share).toFixed(1)} % of the FLOPs`;
  row.addEventListener("click", (event) => { event.preventDefault(); reveal(box); });
  rows.set(box.id, row);
  const fill = () => inner.forEach((child) => rows.has(child.id) || branch(node, child, depth - 1));
  node.addEventListener("toggle", fill);
  if (depth > 0 && box.kind !== "run") { node.open = true; fill(); }
}

// ---- the panel

const panel = document.getElementById("panel");
function part(tag, text, parent) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  (parent || panel).appendChild(node);
  return node;
}
function table(title, rows, most = Infinity) {
  if (!rows.length) return;
  const around = part("details");
  around.open = rows.length <= most;
  part("summary", title + (around.open ? "" : ` (${rows.length})`), around);
  const body = part("table", undefined, around);
  body.className = title.split(" ")[0];
  for (const row of rows) { const line = part("tr", undefined, body); row.forEach((cell) => part("td", cell, line)); }
}
function describe(box) {
  panel.textContent = "";
  const path = part("nav");
  for (let around = box.around; around !== undefined; around = boxes[around].around) {
    const link = document.createElement("a"), to = boxes[around];
    link.textContent = cut(to.label, 40);
    link.addEventListener("click", () => reveal(to));
    path.prepend(link, " / ");
  }
  part("h2", box.label);
  if (box.text) part("code", box.text);
  table("", box.facts);
  for (const [of, text] of box.notes) if (of === "writes" || of === "shares") part("p", text).className = of;
  table("takes", box.inputs);
  table("gives", box.outputs);
  if (box.source !== undefined) { part("h3", "source"); part("code", program.sources[box.source]); }
  table("parameters and buffers", parameters(box), 12);
  table("attributes of the module", box.attributes || [], 12);
}
function parameters(box) {
  const found = new Map();
  const add = (inner) => { (inner.parameters || []).forEach((row) => found.set(row[0], row)); inner.children.forEach((id) => add(boxes[id])); };
  add(box);
  return [...found.values()];
}

// ---- moving

const at = { x: 20, y: 20, scale: 1 };
let moved = false;
function place() { view.setAttribute("transform", `translate(${at.x},${at.y}) scale(${at.scale})`); }
function largest() {
  const { width: w, height: h } = size(boxes[0]);
  return Math.min(1, (canvas.clientWidth - 40) / w, (canvas.clientHeight - 40) / h);
}
function fit(least) {
  at.scale = Math.max(least, largest());
  at.x = Math.max(20, (canvas.clientWidth - size(boxes[0]).width * at.scale) / 2);
  at.y = 20;
  place();
}
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const factor = Math.exp(-event.deltaY / 500), frame = canvas.getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  at.x = x - (x - at.x) * factor; at.y = y - (y - at.y) * factor; at.scale *= factor;
  place();
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  moved = false;
  const from = { x: event.clientX - at.x, y: event.clientY - at.y, left: event.clientX, top: event.clientY };
  const move = (e) => {
    if (Math.abs(e.clientX - from.left) + Math.abs(e.clientY - from.top) > 4) moved = true;
    at.x = e.clientX - from.x; at.y = e.clientY - from.y; place();
  };
  window.addEventListener("pointermove", move);
  window.addEventListener("pointerup", () => window.removeEventListener("pointermove", move), { once: true });
});
function foldAll() { open.clear(); open.add(0); layouts.clear(); render(); fit(0); }

// At first, as many levels are open as fit on the screen in a size that can be read; and all outside the first that has
// more than three parts, which a wrapper of a model has not.
const READABLE = 0.75, FEW = 3;
function unfold() {
  const inside = (list) => list.flatMap((box) => box.children.map((id) => boxes[id]));
  let isWrapper = true;
  for (let level = [boxes[0]]; level.length && level.length < 40; level = inside(level)) {
    const large = level.filter((box) => box.kind !== "run" && inside([box]).some((child) => child.children.length || box.children.length > 2));
    const before = [...open];
    large.forEach((box) => open.add(box.id));
    layouts.clear();
    if (!isWrapper && largest() < READABLE) { open.clear(); before.forEach((id) => open.add(id)); layouts.clear(); return; }
    isWrapper = isWrapper && large.every((box) => box.children.length <= FEW);
    level = large;
  }
}
document.getElementById("fit").addEventListener("click", () => fit(0));
document.getElementById("fold").addEventListener("click", foldAll);

function follow() {
  const box = byKey.get(decodeURIComponent(location.hash.slice(1)));
  if (box && box !== selected) { open.add(box.id); reveal(box); }
}
window.addEventListener("hashchange", follow);
document.body.classList.toggle("beside", !isAlone);
branch(document.getElementById("tree"), boxes[0], 2);
unfold();
render();
fit(0.6);
describe(boxes[0]);
follow();
