"""Write the reference pages."""

from docs._reference import FOLDER, pages

FOLDER.mkdir(exist_ok=True)
for name, text in pages().items():
    (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"Wrote {FOLDER / name}")
