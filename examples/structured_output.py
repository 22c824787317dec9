"""An answer that fits a pydantic model. The server allows only tokens that keep it valid."""

from __future__ import annotations

import os

from openai import OpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("API_KEY", "none"))


class Dish(BaseModel):
    name: str = Field(max_length=40)
    vegetarian: bool
    minutes: int = Field(ge=1, le=600)
    ingredients: list[str] = Field(min_length=2, max_length=4)


completion = client.chat.completions.parse(
    model="default",
    messages=[{"role": "user", "content": "Describe a simple tomato soup."}],
    response_format=Dish,
    max_tokens=300,
    temperature=0,
)
dish = completion.choices[0].message.parsed
print(f"{dish.name}: {dish.minutes} minutes, {'no' if dish.vegetarian else 'with'} meat")
for ingredient in dish.ingredients:
    print("-", ingredient)
