// Where the bytes are: frames of modules, each divided by kind, dtype, or what changed.

const SHARING = { s: 'shared with the checkpoint before', u: 'unchanged, but written again', c: 'changed', '?': 'not known' };
const TRAINED = { t: 'trained, with its moments', f: 'frozen weights', '?': 'other' };
const STATES = { '=': 'equal', d: 'differs', x: 'other shape or dtype', '-': 'only in A', '+': 'only in B' };

// The fonts of a name and of a part, as in style.css.
const NAME_FONT = '600 12px', PART_FONT = '12px';

// What a frame has beside its name, and a tile beside its text.
const FRAME_MARGIN = 12, TILE_MARGIN = 9;

// The most frames, but for parts of a module that has most of the bytes.
const MOST_FRAMES = 60;

// The ways to divide bytes: the title, the category of a tensor, the order of categories if it is fixed, and whether
// their colours are steps.
function listDivisions(data, tensors) {
  const divisions = [['kind', (tensor) => tensor.kind, listKinds(tensors)], ['dtype', (tensor) => tensor.dtype, null]];
  if (data.tensors.trained) divisions.push(['training', (tensor) => TRAINED[tensor.trained], Object.values(TRAINED)]);
  if (data.before) divisions.push(['sharing', (tensor) => SHARING[tensor.sharing], Object.values(SHARING)]);
  if (data.states) divisions.unshift(rankChanges(tensors), ['difference', (tensor) => STATES[tensor.state], Object.values(STATES)]);
  return divisions;
}

// The kinds in the order of their colours, which are the same in all pages: the sixth is the last one for states.
function listKinds(tensors) {
  const states = [...new Set(tensors.map((tensor) => tensor.kind))].filter((kind) => kind !== 'weights' && kind !== 'values').sort();
  return ['weights', ...Array.from({ length: 5 }, (_, number) => states[number] ?? ''), 'values', ...states.slice(5)];
}

// Divide by the largest difference of an element, in powers of ten below the largest one of all.
function rankChanges(tensors) {
  const largest = findLargestDifference(tensors);
  const top = largest > 0 && largest < Infinity ? Math.floor(Math.log10(largest)) : 0;
  const steps = [4, 3, 2, 1, 0].map((below) => `below ${formatNumber(10 ** (top - below + 1))}`);
  const order = ['equal', ...steps];
  const categoryOf = (tensor) => {
    if (tensor.state === '=') return order[0];
    if (tensor.state !== 'd' || !Number.isFinite(tensor.absolute) || !tensor.absolute) return order[5];
    return order[Math.min(5, Math.max(1, 5 - (top - Math.floor(Math.log10(tensor.absolute)))))];
  };
  return ['change', categoryOf, order, true];
}

// The numbers of colours by category: the largest first, the last colour is for all others.
function colorCategories(tensors, categoryOf, order) {
  const sizes = new Map();
  for (const tensor of tensors) sizes.set(categoryOf(tensor), (sizes.get(categoryOf(tensor)) ?? 0) + tensor.bytes);
  const names = order ? order.filter((name) => sizes.has(name)) : [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a));
  return new Map(names.map((name, number) => [name, { number: Math.min(order ? order.indexOf(name) : number, 7), bytes: sizes.get(name) }]));
}

// Replace a module that has most of the bytes by its parts, as long as there are few frames.
function chooseFrames(node) {
  let frames = [...node.children.values()].filter((child) => child.bytes > 0);
  for (;;) {
    const largest = frames.reduce((best, frame) => (frame.bytes > (best?.bytes ?? 0) ? frame : best), null);
    if (!largest || largest.bytes < 0.6 * node.bytes || !largest.children.size || frames.length + largest.children.size > 90) break;
    frames = frames.flatMap((frame) => (frame === largest ? [...frame.children.values()].filter((child) => child.bytes > 0) : [frame]));
  }
  frames.sort((a, b) => b.bytes - a.bytes);
  const rest = frames.slice(MOST_FRAMES);
  if (sumBytes(rest) > 0.5 * node.bytes) return joinNeighbours(frames);
  if (rest.length) frames.splice(MOST_FRAMES, rest.length, joinFrames(rest, formatCount(rest.length, 'smaller module')));
  return frames;
}

const sumBytes = (frames) => frames.reduce((sum, frame) => sum + frame.bytes, 0);

const joinFrames = (frames, name) => ({ path: null, name, bytes: sumBytes(frames), tensors: frames.flatMap((frame) => frame.tensors), children: new Map() });

// Join many small modules to frames of about equal size, in the order of their names. Larger ones stay as they are.
function joinNeighbours(frames) {
  const share = sumBytes(frames) / MOST_FRAMES, isLarge = (frame) => frame.bytes > share, joined = [];
  let bytes = 0;
  for (const frame of frames.filter((each) => !isLarge(each)).sort((a, b) => a.tensors[0].row - b.tensors[0].row)) {
    const place = Math.floor(bytes / share);
    (joined[place] ??= []).push(frame);
    bytes += frame.bytes;
  }
  return frames.filter(isLarge).concat(joined.filter(Boolean).map((group) => (group.length === 1 ? group[0] : joinFrames(group, `${group[0].name} … ${group.at(-1).name}`))));
}

function makeTreemap(data, tree, onSelect) {
  const divisions = listDivisions(data, tree.tensors);
  let division = divisions[0], node = tree, width = 0;
  const map = make('ul', { class: 'map', 'aria-label': 'Modules, the largest first' });
  const crumbs = make('ol', { class: 'crumbs', 'aria-label': 'Path of the module' });
  const legend = make('ul', { class: 'legend' });
  const choice = make('fieldset', { class: 'choice' }, make('legend', {}, 'Divide by'), ...divisions.map((each, number) => {
    const input = make('input', { type: 'radio', name: 'division', onchange: () => { division = each; draw(); } });
    input.checked = number === 0;
    return make('label', {}, input, make('span', {}, each[0]));
  }));
  const compared = data.before ? `compared with ${data.before}` : 'press a module to look inside';
  const view = panel('bytes', 'Where the bytes are', compared, crumbs, map, legend);
  view.querySelector('header').append(choice);

  function draw() {
    const categories = colorCategories(tree.tensors, division[1], division[2]);
    drawCrumbs(crumbs, node, onSelect);
    legend.replaceChildren(...[...categories].map(([name, { number, bytes }]) => make('li', {}, make('span', { class: `swatch ${division[3] ? 's' : 'k'}${number}` }), `${name} · ${formatBytes(bytes)}`)));
    if (!node.bytes) map.replaceChildren(make('li', { class: 'muted' }, 'no bytes'));
    else if (width) map.replaceChildren(...layOut(node, width, map.clientHeight).map((frame) => drawFrame(frame, node, categories, division, onSelect)));
  }
  new ResizeObserver(() => { if (map.clientWidth !== width) { width = map.clientWidth; requestAnimationFrame(draw); } }).observe(map);
  return { view, select: (module) => { node = module; draw(); } };
}

function layOut(node, width, height) {
  const frames = chooseFrames(node);
  const shown = frames.length ? frames : [{ ...node, path: null }];
  const root = d3.hierarchy({ children: shown.map((frame) => ({ frame, value: frame.bytes })) }).sum((item) => item.value ?? 0);
  return d3.treemap().size([width, height]).paddingInner(2).round(true)(root).leaves().map((leaf) => ({ ...leaf.data, x: leaf.x0, y: leaf.y0, width: leaf.x1 - leaf.x0, height: leaf.y1 - leaf.y0 }));
}

// Return the width of a text. Fonts differ much between systems, so no average would do.
const canvas = document.createElement('canvas').getContext('2d');

function measureText(text, font) {
  canvas.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return canvas.measureText(text).width;
}

// Return what fits of a path below a module: all of it, or its last parts.
function shortenPath(path, below, width) {
  const parts = path.slice(below ? below.length + 1 : 0).split('.');
  while (parts.length > 1 && measureText(parts.join('.'), NAME_FONT) > width) parts.shift();
  return parts.join('.');
}

function drawCrumbs(crumbs, node, onSelect) {
  const parts = node.path ? node.path.split('.') : [];
  const items = ['all tensors', ...parts].map((part, depth) => {
    const path = parts.slice(0, depth).join('.');
    if (depth === parts.length) return make('li', { 'aria-current': 'true' }, `${part} (${formatBytes(node.bytes)})`);
    return make('li', {}, make('button', { class: 'link', type: 'button', onclick: () => onSelect(path) }, part));
  });
  crumbs.replaceChildren(...items);
}

function drawFrame({ frame, x, y, width, height }, node, categories, [, categoryOf, , isStepped], onSelect) {
  const sizes = new Map();
  for (const tensor of frame.tensors) sizes.set(categoryOf(tensor), (sizes.get(categoryOf(tensor)) ?? 0) + tensor.bytes);
  const parts = [...sizes].sort((a, b) => b[1] - a[1]);
  const name = frame.path === null ? frame.name : shortenPath(frame.path, node.path, width - FRAME_MARGIN);
  const share = formatShare(frame.bytes, node.bytes);
  const title = `${name} · ${formatBytes(frame.bytes)}`;
  const header = width > 34 && height > 34 ? 18 : 0;
  const label = `${title}, ${share}: ${frame.path ?? ''} ${parts.map(([part, bytes]) => `${part} ${formatBytes(bytes)}`).join(', ')}`;
  const button = frame.path === null ? make('span', { class: 'frame', role: 'img', 'aria-label': label, title: label })
    : make('button', { class: 'frame', type: 'button', 'aria-label': label, title: label, onclick: () => onSelect(frame.path) });
  if (header) button.append(make('b', {}, measureText(title, NAME_FONT) < width - FRAME_MARGIN ? title : name));
  const area = { width: width - 2, height: height - 2 - header };
  const root = d3.hierarchy({ children: parts.map(([part, bytes]) => ({ part, value: bytes })) }).sum((item) => item.value ?? 0);
  for (const leaf of d3.treemap().tile(d3.treemapSliceDice).size([area.width, Math.max(0, area.height)]).round(true)(root).leaves()) {
    const size = [leaf.x1 - leaf.x0, leaf.y1 - leaf.y0];
    const text = size[1] > 16 && measureText(leaf.data.part, PART_FONT) < size[0] - TILE_MARGIN ? leaf.data.part : '';
    button.append(place(make('span', { class: `tile ${isStepped ? 's' : 'k'}${categories.get(leaf.data.part).number}`, 'data-text': text }), {
      left: `${leaf.x0}px`, top: `${leaf.y0 + header}px`, width: `${size[0]}px`, height: `${size[1]}px` }));
  }
  return place(make('li', {}, button), { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
}

