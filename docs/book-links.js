// Pages link to files of the repository that are not part of the book, such as results of benchmarks. In the
// book these links lead to the repository.
"use strict";
const repository = "https://github.com/megaburn/megaburn/blob/main/";
for (const link of document.querySelectorAll("main a[href^='../'], main a[href^='clusters/']")) {
    const [path, anchor] = link.getAttribute("href").split("#");
    const file = path.startsWith("../") ? path.slice(3) : `docs/${path}`;
    // mdBook has taken links to Markdown for pages of the book.
    link.href = repository + file.replace(/\.html$/, ".md") + (anchor ? `#${anchor}` : "");
}
