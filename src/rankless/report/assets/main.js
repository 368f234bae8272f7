// Put the page together. The part of the address after # is a module: a link to it selects it.

function main() {
  const data = JSON.parse(document.getElementById('data').textContent);
  const tensors = decodeTensors(data), tree = buildTree(tensors), page = document.getElementById('page');
  document.getElementById('subtitle').textContent = data.path;
  document.getElementById('footer').textContent = `Made on ${formatTime(data.made)}. This file loads nothing from anywhere.`;
  const goTo = (path) => { location.hash = path ? `#${encodeURIComponent(path)}` : '#'; };
  const map = makeTreemap(data, tree, goTo), table = makeTensorTable(data, tensors, goTo);
  const views = [];
  if (data.kind === 'difference') views.push(makeSides(data, tensors));
  else views.push(makeHealth(data), makeCards(data, tensors));
  views.push(data.timeline ? make('div', { class: 'pair' }, makeTimeline(data), map.view) : map.view);
  if (data.timeline) views.push(makeEvents(data));
  views.push(table.view);
  if (data.checkpoints) views.push(makeCheckpoints(data));
  if (data.values?.length) views.push(makeValues(data));
  page.replaceChildren(make('div', { class: 'views' }, ...views));

  function followAddress() {
    let path = '';
    try { path = decodeURIComponent(location.hash.slice(1)); } catch { /* no module has such a name */ }
    const module = findModule(tree, path);
    if (!module) return;
    map.select(module);
    table.showModule(module.path);
  }
  addEventListener('hashchange', followAddress);
  followAddress();
}

function makeValues(data) {
  const columns = [['value', 'text'], ['A', 'text'], ['B', 'text']];
  return panel('values', 'Values that differ', 'settings of optimizers, counters, states', makeTable('Values that differ', columns, data.values));
}

main();
