import js from "@eslint/js";
import globals from "globals";

export default [
  {
    files: ["beaconscope/report/assets/*.js", "tests/report/js/*.js"],
    ...js.configs.recommended,
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.browser },
    rules: {
      ...js.configs.recommended.rules,
      eqeqeq: "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-shadow": "error",
      "no-var": "error",
      "prefer-const": "error",
      // Text of a trace must never be read as markup.
      "no-restricted-properties": [
        "error",
        ...["innerHTML", "outerHTML", "insertAdjacentHTML"].map((property) => ({ property, message: "Use textContent." })),
        { object: "document", property: "write", message: "Use textContent." },
      ],
    },
  },
  { files: ["tests/report/js/*.js"], languageOptions: { globals: globals.node } },
];
