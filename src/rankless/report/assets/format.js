// Text of numbers and times, and elements. Text reaches the page by textContent only.

const UNITS = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];

function formatBytes(bytes) {
  let value = bytes, unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toPrecision(3) : value} ${UNITS[unit]}`;
}

function formatSeconds(seconds) {
  if (seconds >= 120) return `${(seconds / 60).toPrecision(3)} min`;
  return seconds >= 0.0995 ? `${seconds.toPrecision(3)} s` : `${(seconds * 1000).toPrecision(2)} ms`;
}

function formatNumber(number) {
  if (number === null || number === undefined) return '–';
  if (number === 0) return '0';
  if (!Number.isFinite(number)) return '∞';
  const size = Math.abs(number);
  return size >= 1e5 || size < 1e-3 ? number.toExponential(2) : String(+number.toPrecision(4));
}

// Return a power of two, with a raised exponent.
const formatPower = (exponent) => `2${[...String(exponent)].map((digit) => (digit === '-' ? '⁻' : '⁰¹²³⁴⁵⁶⁷⁸⁹'[digit])).join('')}`;

const formatCount = (count, noun) => `${count.toLocaleString('en')} ${noun}${count === 1 ? '' : 's'}`;

function formatTime(seconds) {
  const date = new Date(seconds * 1000);
  if (!seconds || Number.isNaN(date.getTime())) return '–';
  const two = (number) => String(number).padStart(2, '0');
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

function formatAge(seconds) {
  for (const [unit, size] of [['day', 86400], ['hour', 3600], ['minute', 60]]) {
    if (seconds >= size) return formatCount(Math.floor(seconds / size), unit);
  }
  return formatCount(Math.max(0, Math.floor(seconds)), 'second');
}

const formatStep = (step) => (step === null ? '–' : step.toLocaleString('en'));

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : 0;
}

const SVG_TAGS = new Set(['svg', 'path', 'polyline', 'circle']);

// Make an element. Properties of the name of an event are listeners; children are elements or text.
function make(tag, properties = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Place an element: a style attribute would need a weaker security policy.
function place(element, styles) {
  for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, value);
  return element;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const panel = (id, title, note, ...children) => make('section', { class: 'panel', id: `view-${id}`, 'aria-labelledby': `title-${id}`, tabindex: '-1' },
  make('header', {}, make('h2', { id: `title-${id}` }, title), make('span', { class: 'muted' }, note)), ...children);

// A table of few rows. Columns are [title, class]; cells are text or elements.
function makeTable(caption, columns, rows, rowClass = () => null) {
  const head = make('tr', {}, ...columns.map(([title, kind]) => make('th', { scope: 'col', class: kind }, title)));
  const body = rows.map((cells, number) => make('tr', { class: rowClass(number) },
    ...cells.map((cell, column) => make('td', { class: columns[column][1] }, cell))));
  return make('div', { class: 'wide-table', tabindex: '0', role: 'region', 'aria-label': `Table: ${caption}` },
    make('table', { 'aria-label': caption }, make('thead', {}, head), make('tbody', {}, ...body)));
}

const formatShare = (part, whole) => `${(100 * part / (whole || 1)).toFixed(1)} %`;
