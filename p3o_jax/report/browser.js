// The browser of rollouts: run, step and prompt are chosen, the prompt's completions are shown, each token shaded by
// its ratio pi / mu as the update saw it: blue below 1, orange above.
(() => {
  const runs = JSON.parse(document.getElementById("rollout-data").textContent);
  const at = (id) => document.getElementById(id);
  if (!runs.length) return;
  at("browser").hidden = false;

  const BELOW = [0, 114, 178], ABOVE = [230, 139, 0];
  const shade = (logRatio) => {
    if (!Number.isFinite(logRatio)) return "rgb(213, 94, 0)";
    const strength = 0.75 * Math.min(Math.abs(logRatio), 1);
    return `rgba(${(logRatio < 0 ? BELOW : ABOVE).join(",")},${strength.toFixed(3)})`;
  };
  const element = (name, text, attributes = {}) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
    return node;
  };
  const fill = (select, labels, chosen) => {
    select.replaceChildren(...labels.map((label, index) => element("option", label, { value: index })));
    select.selectedIndex = Math.max(0, Math.min(chosen, labels.length - 1));
  };
  const visible = (token) => (token === "" ? "∅" : token.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥"));

  const tokens = (row) => {
    const box = element("div", undefined, { class: "tokens" });
    row.tokens.forEach((token, i) => {
      const node = element("span", visible(token), { title: `token ${i + 1}: log μ ${row.mu[i]}` });
      if (row.ratio) {
        const logRatio = Number(row.ratio[i]);
        node.style.backgroundColor = shade(logRatio);
        node.title += `, log ρ ${row.ratio[i]}, ρ ${Math.exp(logRatio).toPrecision(3)}`;
      }
      box.append(node);
    });
    return box;
  };
  const ess = (row) => {
    const ratios = row.ratio.map((value) => Math.exp(Number(value)));
    const sum = ratios.reduce((a, b) => a + b, 0), square = ratios.reduce((a, b) => a + b * b, 0);
    return (sum * sum) / square / ratios.length;
  };
  const completion = (row) => {
    const facts = [
      ["reward", String(Number(Number(row.reward).toPrecision(4)))],
      ["advantage", (row.advantage >= 0 ? "+" : "−") + Math.abs(row.advantage).toFixed(2)],
      ["ended by", row.ended],
      ["tokens", row.tokens.length],
    ];
    if (row.ratio && row.ratio.length) facts.push(["ESS", ess(row).toFixed(3)]);
    const list = element("p", undefined, { class: "facts" });
    facts.forEach(([name, value]) => list.append(element("span", `${name} `), element("b", value), " "));
    const item = element("li");
    item.className = row.advantage > 0 ? "better" : row.advantage < 0 ? "worse" : "";
    item.append(list, tokens(row));
    return item;
  };

  const show = () => {
    const step = runs[at("run").selectedIndex].steps[at("step").selectedIndex];
    const prompt = step.prompts[at("prompt").selectedIndex];
    const left = step.prompts.length < step.total ? `${step.prompts.length} of the step's ${step.total} prompts are in this page. ` : "";
    const version = prompt.rows[0].version;
    at("of-step").textContent = `${left}Sampled by the policy after ${version} rollout steps. `
      + (prompt.rows[0].ratio ? "Rest the pointer on a token for its numbers." : "This run stored no ratios: tokens are not shaded.");
    at("prompt-index").textContent = prompt.index;
    at("prompt-text").textContent = prompt.prompt;
    at("completions").replaceChildren(...prompt.rows.map(completion));
    at("previous").disabled = at("prompt").selectedIndex === 0;
    at("next").disabled = at("prompt").selectedIndex === step.prompts.length - 1;
  };
  const chooseStep = () => {
    const step = runs[at("run").selectedIndex].steps[at("step").selectedIndex];
    const mean = (rows) => rows.reduce((sum, row) => sum + Number(row.reward), 0) / rows.length;
    fill(at("prompt"), step.prompts.map((p) => `${p.index}  (mean reward ${mean(p.rows).toFixed(2)})`), at("prompt").selectedIndex);
    show();
  };
  const chooseRun = () => {
    const steps = runs[at("run").selectedIndex].steps.map((step) => step.step);
    const same = steps.map(String).indexOf(at("step").selectedOptions[0]?.textContent);
    fill(at("step"), steps, same < 0 ? steps.length - 1 : same);  // the same step of another run, else its last
    chooseStep();
  };
  const move = (by) => { at("prompt").selectedIndex += by; show(); };

  fill(at("run"), runs.map((run) => run.label), 0);
  at("run").addEventListener("change", chooseRun);
  at("step").addEventListener("change", chooseStep);
  at("prompt").addEventListener("change", show);
  at("previous").addEventListener("click", () => move(-1));
  at("next").addEventListener("click", () => move(1));
  chooseRun();
})();
