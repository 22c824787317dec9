"""Twenty prompts for the embedded model: prose, code, chat, other scripts, odd white space."""

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees Celsius because",
    "import numpy as np\n\nx = np.",
    "1, 2, 4, 8, 16,",
    "Q: What is the largest planet?\nA:",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n"
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "La Tour Eiffel se trouve à",
    "SELECT name, age FROM",
    "The quick brown fox",
    "    for i in range(10):\n        print(",
    "日本の首都は",
    "Ingredients:\n- 2 eggs\n- 1 cup of",
    "In 1969, humans first",
    "\n\n\n# Title\n\n",
    "Emoji: 🎉🎉 means",
]
