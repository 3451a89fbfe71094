// Uses the page of `megaburn watch` in Chromium. README.md says how to run it.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { append, stepLine, writeRun } from "./runs.mjs";

// NODE_PATH works for `require` only.
const { chromium } = createRequire(import.meta.url)("playwright-core");

const [megaburn, screenshots] = process.argv.slice(2);
assert(megaburn && screenshots, "usage: node watch.mjs MEGABURN SCREENSHOTS");
mkdirSync(screenshots, { recursive: true });

const root = mkdtempSync(join(tmpdir(), "watch-"));
const checks = [];
const servers = [];
const browserArgs = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"];

/** Starts `megaburn watch` on a free port; returns the URL of the page. */
function serve(...folders) {
  const server = spawn(megaburn, ["watch", "--port", "0", ...folders], { stdio: ["ignore", "pipe", "inherit"] });
  servers.push(server);
  return new Promise((resolve, reject) => {
    let text = "";
    server.stdout.on("data", (part) => {
      text += part;
      const url = text.match(/http:\/\/127\.0\.0\.1:\d+\//)?.[0];
      if (url) resolve({ url, stop: () => server.kill("SIGINT") });
    });
    server.on("error", reject);
    server.on("exit", (code) => reject(new Error(`megaburn watch ended with ${code}: ${text}`)));
  });
}

async function check(what, run) {
  await run();
  checks.push(what);
  console.log(`ok  ${what}`);
}

/** The number of pixels of a chart's canvas that are drawn in something like a colour. */
function inked(page, title, [r, g, b]) {
  return page.evaluate(([title, r, g, b]) => {
    const card = [...document.querySelectorAll(".chart")].find((card) => card.querySelector("h2").textContent === title);
    const canvas = card.querySelector("canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let at = 0; at < data.length; at += 4) {
      const far = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
      if (data[at + 3] > 200 && far < 30) count += 1;
    }
    return count;
  }, [title, r, g, b]);
}

const BLUE = [0x25, 0x63, 0xaf];
const ORANGE = [0xc2, 0x57, 0x0c];
const chart = (page, title) => page.locator(".chart", { has: page.locator(`h2:text-is("${title}")`) });
const plot = (page, title) => chart(page, title).locator(".plot");
const settled = (page) => page.waitForTimeout(400);
const shoot = (page, name) => page.screenshot({ path: join(screenshots, `${name}.png`) });

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: browserArgs });
const errors = [];

async function open(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, colorScheme: "light", ...options });
  const page = await context.newPage();
  page.on("console", (message) => message.type() === "error" && !/404/.test(message.text()) && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("request", (request) => assert(request.url().startsWith(url), `the page loads ${request.url()}`));
  await page.goto(url);
  return page;
}

try {
  const one = writeRun(root, "one", 600, { of: 1000, state: "running", spikeAt: 400, skippedAt: 200, resumeAfter: 300 });
  const two = writeRun(root, "two", 1000, {
    lr: 1e-3, pp: 2, experts: 6, precisionAt: 500, nullAt: 800, state: "failed",
    reason: "step 1000 is not finite (loss NaN, gradient norm NaN); the weights are those of step 999",
  });
  const long = writeRun(root, "long", 100_000, { spikeAt: 77_777, resumeAfter: 60_000 });
  const { url, stop } = await serve(one, two, long);
  const page = await open(url);

  await check("the runs are listed with what they do", async () => {
    await page.waitForSelector("#runs li:nth-child(3)");
    const isRead = () => {
      const text = document.querySelector("#runs li:nth-child(3)").textContent;
      return /100\s000 of 100\s000/.test(text) && !text.includes("reading");
    };
    await page.waitForFunction(isRead, null, { timeout: 120000 });
    const text = await page.locator("#runs").innerText();
    assert.match(text, /interrupted step 600 of 1\s000/);
    assert.match(text, /failed step 1\s000 of 1\s000/);
    assert.match(text, /the weights are those of step 999/);
  });
  await check("each measurement has a chart", async () => {
    const titles = await page.locator(".chart h2").allInnerTexts();
    for (const title of ["Loss", "Learning rate", "Gradient norm", "Throughput", "Memory", "Experts' load", "Quantised products"]) {
      assert(titles.includes(title), `${title} is not in ${titles}`);
    }
    assert.equal(titles[0], "Loss");
  });
  await page.getByLabel("long", { exact: true }).uncheck();
  await settled(page);
  await check("two runs are compared in two colours, and one can be hidden", async () => {
    assert(await inked(page, "Loss", BLUE) > 300 && await inked(page, "Loss", ORANGE) > 300);
    await shoot(page, "compare-light");
    await page.getByLabel("two", { exact: true }).uncheck();
    await settled(page);
    assert.equal(await inked(page, "Loss", ORANGE), 0);
    await page.getByRole("button", { name: "show only two" }).click();
    await settled(page);
    assert.equal(await inked(page, "Loss", BLUE), 0);
    await page.getByRole("button", { name: "Show all", exact: true }).click();
  });
  await check("the pointer shows values, and what happened there", async () => {
    await page.getByRole("button", { name: "show only one" }).click();
    await settled(page);
    const box = await plot(page, "Loss").boundingBox();
    const x = box.x + 62 + ((400 - 1) / 599) * (box.width - 62 - 12);
    await page.mouse.move(x, box.y + 60);
    const text = await page.locator("#tooltip").innerText();
    assert.match(text, /step (39|40)\d/);
    assert.match(text, /one: training/);
    assert.match(text, /spike, loss/);
    await shoot(page, "hover");
  });
  await check("dragging zooms all charts, and a double click shows all", async () => {
    const box = await plot(page, "Loss").boundingBox();
    await page.mouse.move(box.x + 200, box.y + 80);
    await page.mouse.down();
    await page.mouse.move(box.x + 300, box.y + 90, { steps: 4 });
    await page.mouse.up();
    const reset = page.locator("#reset");
    assert(await reset.isEnabled());
    await plot(page, "Loss").dblclick();
    assert(await reset.isDisabled());
  });
  await check("the keyboard moves the cursor, zooms and switches the axis", async () => {
    await plot(page, "Loss").focus();
    await page.keyboard.press("End");
    await page.keyboard.press("ArrowLeft");
    assert.match(await page.locator("#spoken").textContent(), /^step 599: one training /);
    await page.keyboard.press("+");
    assert(await page.locator("#reset").isEnabled());
    await page.keyboard.press("l");
    await settled(page);
    assert.equal(await chart(page, "Loss").getByRole("button", { name: /logarithmic/ }).getAttribute("aria-pressed"), "true");
    await shoot(page, "keyboard-log");
    await page.keyboard.press("0");
    await page.keyboard.press("l");
    assert.match(await plot(page, "Loss").getAttribute("aria-label"), /Loss, 1 runs\. one, training: .* at step 600/);
  });
  await check("lines that are appended appear, and half a line waits", async () => {
    append(one, stepLine(601, 1000));
    const text = JSON.stringify(stepLine(602, 1000, { loss: 7.25 }));
    append(one, text.slice(0, 30));
    const first = page.locator("#runs li").first();
    await page.waitForFunction(() => /running step 601 of/.test(document.querySelector("#runs li").textContent), null, { timeout: 15000 });
    append(one, text.slice(30) + "\n");
    await page.waitForFunction(() => /loss 7.25/.test(document.querySelector("#runs li").textContent), null, { timeout: 15000 });
    assert.match(await first.innerText(), /step 602 of/);
  });
  await check("a run that begins anew in its folder is read anew", async () => {
    writeRun(root, "one", 40, { of: 1000, state: "running" });
    await page.waitForFunction(() => /step 40 of/.test(document.querySelector("#runs li").textContent), null, { timeout: 15000 });
    writeRun(root, "one", 600, { of: 1000, state: "running", spikeAt: 400, skippedAt: 200, resumeAfter: 300 });
    await page.waitForFunction(() => /step 600 of/.test(document.querySelector("#runs li").textContent), null, { timeout: 15000 });
  });
  await check("tokens and time are axes, and smoothing draws a mean", async () => {
    await page.getByRole("button", { name: "Show all", exact: true }).click();
    await page.getByLabel("long", { exact: true }).uncheck();
    await page.locator("#x").selectOption("tokens");
    await page.locator("#smoothing").fill("0.9");
    await settled(page);
    const before = await inked(page, "Loss", BLUE);
    assert(before > 200);
    const box = await plot(page, "Loss").boundingBox();
    await page.mouse.move(box.x + 150, box.y + 60);
    assert.match(await page.locator("#tooltip").innerText(), /tokens .*M[\s\S]*mean /);
    await page.locator("#x").selectOption("seconds");
    await settled(page);
    await page.mouse.move(box.x + 151, box.y + 60);
    assert.match(await page.locator("#tooltip").innerText(), /time .*min/);
    await shoot(page, "smoothed-time");
  });
  await check("100,000 steps are thinned out, and a zoom shows each step", async () => {
    await page.locator("#smoothing").fill("0");
    await page.locator("#x").selectOption("step");
    await page.getByRole("button", { name: "show only long" }).click();
    await settled(page);
    await shoot(page, "long");
    const box = await plot(page, "Loss").boundingBox();
    const at = (step) => box.x + 62 + (step / 100000) * (box.width - 74);
    await page.mouse.move(at(75000), box.y + 80);
    await page.mouse.down();
    await page.mouse.move(at(80000), box.y + 90, { steps: 3 });
    const asked = page.waitForResponse((response) => response.url().includes("first="));
    await page.mouse.up();
    const part = await (await asked).json();
    assert(part.series.loss.step.length > 1000 && part.series.loss.mean === undefined);
    await settled(page);
    await shoot(page, "long-zoomed");
    await plot(page, "Loss").dblclick();
  });
  await check("events, numbers and layers are tables", async () => {
    await page.getByRole("button", { name: "Show all", exact: true }).click();
    await page.getByRole("tab", { name: "Events" }).click();
    const text = await page.locator("#events").innerText();
    for (const words of ["start 2 after step 300, layout tp4-sp; optimizer.clip_grad: 1.0 → 0.5", "not finite",
      "blocks.3.mlp.up: not quantised until step 900", "the step was skipped", "checkpoint of step 600"]) {
      assert(text.includes(words), words);
    }
    await shoot(page, "events");
    await page.getByRole("tab", { name: "Numbers" }).click();
    assert.match(await page.locator("#numbers").innerText(), /eval_loss:code/);
    await shoot(page, "numbers");
    await page.getByRole("tab", { name: "Layers" }).click();
    const layers = await page.locator("#layers").innerText();
    assert(layers.includes("two: experts' load at step 1000") && layers.includes("blocks.0.mlp.up"), layers);
    await shoot(page, "layers");
  });
  await check("configurations are shown and compared, with the pipeline", async () => {
    await page.getByRole("tab", { name: "Configuration" }).click();
    await page.getByLabel("Run", { exact: true }).selectOption({ label: "two" });
    await page.waitForSelector("#config pre");
    await page.getByLabel("compared with").selectOption({ label: "one" });
    await page.waitForSelector("#config table");
    const text = await page.locator("#config").innerText();
    assert(/2 of \d+ keys differ/.test(text) && /optimizer\.lr\s+0\.001\s+0\.0003/.test(text), text);
    assert(await page.locator("#config img").evaluate((image) => image.decode().then(() => image.naturalWidth > 100)));
    await shoot(page, "config");
  });
  await check("dark colours are those of the system, and can be chosen", async () => {
    const dark = await open(url, { colorScheme: "dark" });
    await dark.waitForSelector("#runs li:nth-child(3)");
    await settled(dark);
    await dark.getByLabel("long", { exact: true }).uncheck();
    await settled(dark);
    const back = () => dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
    assert.equal(await back(), "rgb(20, 23, 28)");
    await shoot(dark, "compare-dark");
    await dark.locator("#theme").selectOption("light");
    assert.equal(await back(), "rgb(244, 245, 247)");
    await dark.close();
  });
  await check("a screen of 400 pixels is enough", async () => {
    const narrow = await open(url, { viewport: { width: 400, height: 800 }, deviceScaleFactor: 2 });
    await narrow.waitForSelector("#runs li:nth-child(3)");
    await settled(narrow);
    for (const tab of ["Charts", "Events", "Configuration", "Numbers"]) {
      await narrow.getByRole("tab", { name: tab }).click();
      await settled(narrow);
      const width = await narrow.evaluate(() => document.documentElement.scrollWidth);
      assert(width <= 400, `${tab} is ${width} pixels wide`);
    }
    await narrow.getByRole("tab", { name: "Charts" }).click();
    await shoot(narrow, "narrow");
    await plot(narrow, "Loss").scrollIntoViewIfNeeded();
    await settled(narrow);
    await shoot(narrow, "narrow-charts");
    await narrow.close();
  });
  await check("a server that ended is noticed", async () => {
    stop();
    await page.waitForFunction(() => /does not answer/.test(document.getElementById("status").textContent), null, { timeout: 15000 });
  });

  await check("an empty run is waited for", async () => {
    const empty = join(root, "empty");
    mkdirSync(empty);
    writeFileSync(join(empty, "metrics.jsonl"), "");
    const server = await serve(empty);
    const waiting = await open(server.url);
    await waiting.waitForSelector("text=There are no steps yet.");
    append(empty, stepLine(1, 10));
    await waiting.waitForSelector("text=Gradient norm", { timeout: 15000 });
    await waiting.close();
    server.stop();
  });
  const unexpected = errors.filter((text) => !/ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE/.test(text));
  assert.deepEqual(unexpected, [], "the page logs errors");
  console.log(`${checks.length} checks; screenshots are in ${screenshots}`);
} finally {
  await browser.close();
  servers.forEach((server) => server.kill("SIGKILL"));
  rmSync(root, { recursive: true });
}
