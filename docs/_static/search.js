// Searches the sections of all pages, and shows the text of each result. Sphinx's own search finds only pages that contain all
// words of a question, and its excerpts need a web server. TEXTS has the ids, the title and the text of each section.
document.addEventListener("DOMContentLoaded", () => {
  const stemOf = (word) => word.replace(/(?<=...)(?:ies|y|es|s|ed|ing)$/, "");
  const stemsOf = (text) => splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word)).map(stemOf);
  const stems = stemsOf(new URLSearchParams(location.search).get("q") || "");
  const starts = new Map(stems.map((stem) => [stem, new RegExp(`(?<![\\p{L}\\p{N}])${stem}`, "iu")]));
  const found = (text) => stems.filter((stem) => starts.get(stem).test(text));
  const sections = Object.entries(TEXTS).flatMap(([page, all]) => all.map((section) => [page, section]));
  // A word in few sections says more about the question than a word in many.
  const weights = new Map(stems.map((stem) => {
    const count = sections.filter(([, [, title, text]]) => starts.get(stem).test(`${title} ${text}`)).length;
    return [stem, Math.log((sections.length + 1) / (count + 1))];
  }));
  const weigh = (words) => words.reduce((sum, stem) => sum + (weights.get(stem) || 0), 0);
  // Pages for those who change elasticrs or compare it come last.
  const last = /^(?:docs\/(?:api|design|architecture|benchmarks|comparison|compatibility|development)|[A-Z]+$)/;
  Scorer.score = (result) => result[4] * (last.test(result[0]) ? 0.4 : 1);

  // Replace the search for pages. Search the sections, and show the best one of each page. A question that contains all words of an
  // entry of the index is probably about the section of that entry.
  const named = new Map();
  Search.performTermsSearch = () => {
    for (const [entry, places] of Object.entries(Search._index.indexentries)) {
      const words = stemsOf(entry);
      if (!words.length || !words.every((word) => stems.includes(word))) continue;
      for (const [file, id] of places) {
        const key = `${Search._index.docnames[file]}#${id}`;
        named.set(key, Math.max(weigh(words), named.get(key) || 0));
      }
    }
    const best = new Map();
    for (const [page, [ids, title, text]] of sections) {
      const entries = Math.max(0, ...ids.map((id) => named.get(`${page}#${id}`) || 0));
      const score = 3 * weigh(found(`${TEXTS[page][0][1]} ${title}`)) + weigh(found(text)) + 4 * entries;
      if (score > (best.get(page)?.[4] || 0)) best.set(page, [page, title, `#${ids[0]}`, null, score, page, SearchResultKind.text]);
    }
    const results = [...best.values()];
    const highest = Math.max(...results.map(Scorer.score));
    return results.filter((result) => Scorer.score(result) >= highest / 4);
  };

  const shown = new Set();
  const isNamed = (page, ids) => ids.some((id) => named.has(`${page}#${id}`));
  function describe(result) {
    const link = result.querySelector("a");
    const [page, anchor] = link.getAttribute("href").split(".html");
    const section = anchor ? TEXTS[page]?.find(([ids]) => ids.includes(anchor.slice(1))) : TEXTS[page]?.[0];
    if (!section) return; // The result is a name in the API reference, which has a description.
    const [ids, title, text] = section;
    if (shown.has(page + ids[0])) return result.remove();
    shown.add(page + ids[0]);
    const pageTitle = TEXTS[page][0][1];
    link.textContent = section === TEXTS[page][0] ? title : `${pageTitle} › ${title}`;
    const places = stems.map((stem) => text.search(starts.get(stem))).filter((place) => place > 120);
    const isStart = !places.length || isNamed(page, ids) || found(`${title} ${text.slice(0, 240)}`).length;
    const start = isStart ? 0 : Math.min(...places) - 80;
    const excerpt = document.createElement("p");
    excerpt.className = "context";
    excerpt.textContent = (start ? "… " : "") + text.slice(start, start + 240) + (start + 240 < text.length ? " …" : "");
    result.append(excerpt);
    for (const stem of stems.filter((stem) => stem.length > 1)) _highlightText(excerpt, stem, "highlighted");
  }

  const seen = ({ addedNodes }) => addedNodes.forEach((node) => node.tagName === "LI" && describe(node));
  const results = document.getElementById("search-results");
  new MutationObserver((changes) => changes.forEach(seen)).observe(results, { childList: true, subtree: true });
});
