// The table of tensors: only the rows in view are elements, so 20,000 rows scroll like 20.

// The height of a row, in which the name has a line of its own on a narrow screen; the most of all; rows out of view.
const ROW_HEIGHT = 34, NARROW_ROW_HEIGHT = 58, MOST_HEIGHT = 560, MARGIN_ROWS = 2;

// The last characters of a name, which are always shown.
const TAIL = 16;

// A norm that grew or shrank by such a factor is marked.
const MOVED = 4;

// The columns: title, width, cell, key to sort by, class, and whether a narrow screen shows it.
function listColumns(data, narrow) {
  const text = (content) => document.createTextNode(content);
  const columns = [
    { title: 'tensor', width: 'minmax(150px, 1fr)', key: (tensor) => tensor.row, kind: 'name', narrow: true },
    { title: 'kind', width: '88px', cell: (tensor) => text(tensor.kind), key: (tensor) => tensor.kind },
    { title: 'dtype, shape', width: narrow ? 'minmax(0, 1fr)' : '148px', narrow: true, cell: (tensor) => text(`${tensor.dtype} [${tensor.shape.join(', ')}]`), key: (tensor) => `${tensor.dtype} ${String(tensor.elements).padStart(16, '0')}` },
    { title: 'size', width: '74px', cell: (tensor) => text(formatBytes(tensor.bytes)), key: (tensor) => -tensor.bytes, kind: 'right', narrow: !data.states },
  ];
  if (data.statistics) {
    const several = data.statistics.tags.length > 1;
    columns.push(
      { title: 'norm', width: '76px', cell: (tensor) => text(formatNumber(tensor.norm)), key: (tensor) => -(tensor.norm ?? -1), kind: 'right', narrow: !several },
      { title: 'min … max', width: '158px', cell: (tensor) => text(tensor.min === null ? '–' : `${formatNumber(tensor.min)} … ${formatNumber(tensor.max)}`), key: (tensor) => -Math.max(Math.abs(tensor.min ?? -1), Math.abs(tensor.max ?? -1)), kind: 'right' },
      { title: 'NaN, inf', width: '66px', cell: (tensor) => makeBad(tensor), key: (tensor) => -(tensor.nans + tensor.infs), kind: 'right' },
      { title: 'values', width: '80px', cell: (tensor) => makeBars(tensor.histogram), key: null });
    if (several) {
      columns.push({ title: 'trend', width: narrow ? '84px' : '158px', cell: (tensor) => makeTrend(tensor, narrow), key: (tensor) => -Math.abs(Math.log(tensor.moved || 1)), kind: 'trend', narrow: true });
    }
  }
  if (data.states) {
    columns.push(
      { title: 'A and B', width: '130px', cell: (tensor) => text(STATES[tensor.state]), key: (tensor) => '=dx-+'.indexOf(tensor.state) * -1 },
      { title: 'differ', width: narrow ? '76px' : '110px', cell: makeMeter, key: (tensor) => -tensor.share, narrow: true },
      { title: 'max abs', width: '84px', cell: (tensor) => text(tensor.share ? formatNumber(tensor.absolute) : ''), key: (tensor) => (isCounter(tensor) ? 0 : -tensor.absolute), kind: 'right', narrow: true },
      { title: 'max rel', width: '84px', cell: (tensor) => text(tensor.share ? formatNumber(tensor.relative) : ''), key: (tensor) => -tensor.relative, kind: 'right' });
  }
  return columns;
}

function makeBad(tensor) {
  if (!tensor.measured) return document.createTextNode('–');
  return tensor.nans + tensor.infs ? make('span', { class: 'badge bad' }, (tensor.nans + tensor.infs).toLocaleString('en')) : document.createTextNode('0');
}

function makeTrend(tensor, narrow) {
  const spark = makeSpark(tensor.norms, narrow ? 80 : 92);
  if (narrow || tensor.moved === null) return spark;
  const moved = tensor.elements > 1 && Math.max(tensor.moved, 1 / tensor.moved) >= MOVED;
  return make('span', { class: 'trend' }, spark, make('span', { class: moved ? 'badge bad' : 'muted' }, `× ${formatNumber(+tensor.moved.toPrecision(3))}`));
}

function makeMeter(tensor) {
  if (!tensor.share) return document.createTextNode('');
  return make('span', { class: 'meter', role: 'img', 'aria-label': `${formatShare(tensor.share, 1)} of the elements differ` }, place(make('i'), { width: `${Math.max(2, 100 * tensor.share)}%` }));
}

function makeTensorTable(data, tensors, onModule) {
  const narrow = matchMedia('(max-width: 700px)');
  const state = { rows: tensors, sorted: null, descending: false, module: '', text: '', kind: '', active: -1, selected: null };
  let columns = [];
  const head = make('div', { class: 'row head', role: 'row', 'aria-rowindex': '1' });
  const body = make('div', { class: 'rows' });
  const scroller = make('div', { class: 'scroller', tabindex: '0', role: 'rowgroup', 'aria-label': 'Rows' }, body);
  const grid = make('div', { class: 'grid', role: 'table', 'aria-label': 'Tensors' }, make('div', { role: 'rowgroup' }, head), scroller);
  const search = make('input', { type: 'search', placeholder: 'such as layers.3 weight', oninput: () => { state.text = search.value; refresh(); } });
  const kinds = make('select', { onchange: () => { state.kind = kinds.value; refresh(); } }, make('option', { value: '' }, 'all'),
    ...[...new Set(tensors.map((tensor) => tensor.kind))].map((kind) => make('option', { value: kind }, kind)));
  const chip = make('button', { class: 'chip', type: 'button', onclick: () => onModule('') });
  const count = make('span', { class: 'muted', role: 'status' });
  const detail = make('div', { class: 'detail', 'aria-live': 'polite' }, make('p', { class: 'muted' }, 'Press a name to see all that is known about a tensor. Arrow keys move between rows.'));
  const view = panel('tensors', 'Tensors', describeStatistics(data),
    make('div', { class: 'tools' }, make('label', { class: 'wide' }, 'Search', search), make('label', {}, 'Kind', kinds), chip, count), grid, detail);
  const drawn = new Map();

  function refresh() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const inside = (tensor) => !state.module || tensor.parameter === state.module || tensor.parameter.startsWith(`${state.module}.`);
    state.rows = tensors.filter((tensor) => inside(tensor) && (!state.kind || tensor.kind === state.kind) && words.every((word) => tensor.path.toLowerCase().includes(word)));
    if (state.sorted) sortRows(state);
    chip.hidden = !state.module;
    chip.textContent = `only in ${state.module} ✕`;
    chip.title = 'Show all modules again';
    count.textContent = `${state.rows.length.toLocaleString('en')} of ${formatCount(tensors.length, 'tensor')}`;
    grid.setAttribute('aria-rowcount', String(state.rows.length + 1));
    state.active = -1;
    scroller.scrollTop = 0;
    redraw();
  }

  function redraw() {
    const height = Math.max(1, state.rows.length) * rowHeight();
    place(body, { height: `${height}px` });
    place(scroller, { height: `${Math.min(height, MOST_HEIGHT)}px` });
    place(head, { 'padding-right': `${12 + scroller.offsetWidth - scroller.clientWidth}px` });
    drawn.clear();
    body.replaceChildren();
    drawRows();
  }

  function drawRows() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / rowHeight()) - MARGIN_ROWS);
    const stop = Math.min(state.rows.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / rowHeight()) + MARGIN_ROWS);
    for (const [number, row] of drawn) {
      if (number < first || number >= stop) { row.remove(); drawn.delete(number); }
    }
    for (let number = first; number < stop; number += 1) {
      if (!drawn.has(number)) {
        const row = makeRow(state.rows[number], number);
        drawn.set(number, row);
        body.append(row);
      }
    }
  }

  function makeRow(tensor, number) {
    const cells = columns.map((column) => {
      const content = column.kind === 'name' ? makeName(tensor, number) : column.cell(tensor);
      return make('div', { class: `cell ${column.kind ?? ''}`, role: 'cell' }, content);
    });
    const row = make('div', { class: `row${tensor === state.selected ? ' selected' : ''}`, role: 'row', 'aria-rowindex': String(number + 2) }, ...cells);
    return place(row, { top: `${number * rowHeight()}px`, height: `${rowHeight()}px` });
  }

  function makeName(tensor, number) {
    const name = tensor.name || tensor.path;
    return make('button', { type: 'button', title: tensor.path, 'aria-label': tensor.path, 'aria-pressed': String(tensor === state.selected), onclick: () => { state.active = number; select(tensor); }, onfocus: () => { state.active = number; } },
      make('span', { class: 'start' }, name.slice(0, -TAIL)), make('span', { class: 'end' }, name.slice(-TAIL)));
  }

  function select(tensor) {
    state.selected = tensor;
    detail.replaceChildren(makeDetail(data, tensor));
    const active = document.activeElement?.closest('.rows') ? state.active : -1;
    redraw();
    if (active >= 0) focusRow(active);
  }

  function focusRow(number) {
    const height = rowHeight(), top = number * height;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + height > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + height - scroller.clientHeight;
    drawRows();
    drawn.get(number)?.querySelector('button').focus({ preventScroll: true });
  }

  const widths = () => columns.filter((column) => !narrow.matches || column.kind !== 'name').map((column) => column.width).join(' ');
  const rowHeight = () => (narrow.matches ? NARROW_ROW_HEIGHT : ROW_HEIGHT);

  function chooseColumns() {
    columns = listColumns(data, narrow.matches).filter((column) => !narrow.matches || column.narrow);
    head.replaceChildren(...columns.map((column) => {
      const sorted = state.sorted?.title === column.title;
      const cell = make('div', { class: `cell ${column.kind === 'right' ? 'right' : column.kind === 'name' ? 'first' : ''}`, role: 'columnheader', 'aria-sort': sorted ? (state.descending ? 'descending' : 'ascending') : null });
      const sort = () => {
        state.descending = sorted && !state.descending;
        state.sorted = column;
        chooseColumns();
        refresh();
        head.children[columns.findIndex((each) => each.title === column.title)].querySelector('button').focus();
      };
      cell.append(column.key ? make('button', { type: 'button', onclick: sort }, `${column.title}${sorted ? (state.descending ? ' ▾' : ' ▴') : ''}`) : column.title);
      return cell;
    }));
    place(grid, { '--columns': widths() });
  }

  scroller.addEventListener('scroll', () => requestAnimationFrame(drawRows), { passive: true });
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(head);
  narrow.addEventListener('change', () => { chooseColumns(); redraw(); });
  scroller.addEventListener('keydown', (event) => {
    const page = Math.floor(scroller.clientHeight / rowHeight()) - 1, last = state.rows.length - 1;
    const target = { ArrowDown: state.active + 1, ArrowUp: state.active - 1, PageDown: state.active + page, PageUp: state.active - page, Home: 0, End: last }[event.key];
    if (target === undefined || last < 0) return;
    event.preventDefault();
    focusRow(Math.min(last, Math.max(0, target)));
  });
  chooseColumns();
  if (data.states) state.sorted = columns.find((column) => column.title === 'max abs');
  chooseColumns();
  refresh();
  return { view, showModule: (module) => { state.module = module; refresh(); const exact = state.rows.find((tensor) => tensor.parameter === module); if (exact) select(exact); } };
}

function sortRows(state) {
  const keys = new Map(state.rows.map((tensor) => [tensor, state.sorted.key(tensor)]));
  const sign = state.descending ? -1 : 1;
  state.rows.sort((a, b) => sign * (keys.get(a) < keys.get(b) ? -1 : keys.get(a) > keys.get(b) ? 1 : 0) || a.row - b.row);
}

function describeStatistics(data) {
  if (data.states) return 'the largest differences first';
  if (!data.statistics) return 'names, dtypes and shapes; --stats adds norms, ranges and histograms';
  const { tags } = data.statistics;
  if (tags.length < 2) return `values of ${tags[0]}`;
  return `values of ${tags.at(-1)}; how norms moved over ${tags.length} checkpoints${data.statistics_omitted ? ', which are sampled; --full shows all' : ''}`;
}
