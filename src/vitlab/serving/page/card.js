// A model's card: the part of Markdown that cards use, as elements. Text stays text, whatever it holds.

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

const element = (tag, ...children) => {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
};

const inline = (text) => {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, strong, emphasis, words, address] = found;
    parts.push(text.slice(from, found.index));
    if (code) parts.push(element("code", code));
    else if (strong) parts.push(element("strong", strong));
    else if (emphasis) parts.push(element("em", emphasis));
    else parts.push(Object.assign(element("a", words), { href: address, rel: "noreferrer noopener", target: "_blank" }));
    from = found.index + whole.length;
  }
  return [...parts, text.slice(from)];
};

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

const table = (lines) => {
  const [head, ...rows] = lines.filter((line) => !/^\s*\|?[\s:|-]+\|?\s*$/.test(line)).map(cells);
  const row = (tag, values) => element("tr", ...values.map((value) => element(tag, ...inline(value))));
  const body = element("tbody", ...rows.map((values) => {
    const made = row("td", values);
    const first = element("th", ...inline(values[0]));
    first.scope = "row";
    made.firstElementChild.replaceWith(first);
    return made;
  }));
  const named = head.filter(Boolean).length > 1 ? [element("thead", row("th", head))] : [];
  const box = element("div", element("table", ...named, body));
  box.className = "scroll";
  return box;
};

// Blocks by what their first line looks like; each takes the lines that belong to it.
const KINDS = [
  [/^```/, (lines) => element("pre", element("code", lines.slice(1).filter((line) => !/^```/.test(line)).join("\n")))],
  [/^\s*\|/, table],
  [/^\s*[-*] /, (lines) => element("ul", ...lines.map((line) => element("li", ...inline(line.replace(/^\s*[-*] /, "")))))],
  [/^\s*\d+[.)] /, (lines) => element("ol", ...lines.map((line) => element("li", ...inline(line.replace(/^\s*\d+[.)] /, "")))))],
];

export const rendered = (markdown) => {
  const lines = markdown.replace(/\r\n?/g, "\n").split("\n"), made = document.createDocumentFragment();
  while (lines.length) {
    const line = lines[0];
    if (!line.trim()) { lines.shift(); continue; }
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (heading) {
      lines.shift();
      made.append(element(heading[1].length > 1 ? "h4" : "h3", ...inline(heading[2])));
      continue;
    }
    const kind = KINDS.find(([start]) => start.test(line)), taken = [lines.shift()];
    if (kind?.[0] === KINDS[0][0]) {
      while (lines.length && !/^```/.test(lines[0])) taken.push(lines.shift());
      lines.shift();
    } else if (kind) {
      while (lines.length && kind[0].test(lines[0])) taken.push(lines.shift());
    } else {
      while (lines.length && lines[0].trim() && !/^#{1,6}\s|^```|^\s*\|/.test(lines[0])) taken.push(lines.shift());
    }
    made.append(kind ? kind[1](taken) : element("p", ...inline(taken.join(" "))));
  }
  return made;
};
