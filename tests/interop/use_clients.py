"""Use one Python client of OpenAI's API as its documentation shows, with its defaults, and print how each use went.

    .venv-clients/NAME/bin/python tests/interop/use_clients.py NAME http://127.0.0.1:8000/v1 MODEL

check_clients.py runs this in the environment of each client, which has that client alone; so imports are in functions.
Answers that must have a form have few possible values, so that the smallest model finishes them.
"""

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

Uses = dict[str, Callable[[], object]]  # by what is tried; a use that fails raises


class Cat(BaseModel):
    """A cat."""

    colour: Literal["black", "white"]
    is_old: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


QUESTION = "What is the weather in Paris?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
CITY = {"city": {"enum": ["Paris", "Rome"]}}
SCHEMA = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Any = [{"type": "function", **FUNCTION}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SHORT = 24  # tokens of an answer without a form


def need(found: Any, what: object = "something") -> Any:
    assert found, f"{found!r} came, but {what} is needed"
    return found


def need_call(calls: Any) -> None:
    """The calls, as the client shows them, are of `weather`; a client that allows several may get several.

    Text beside them is the beginning of a further one that was cut off.
    """
    for call in need([call for call in calls or () if call.type != "message"], "a call"):
        function = getattr(call, "function", call)
        assert function.name == "weather"
        assert json.loads(function.arguments)["city"] in ("Paris", "Rome")


def openai(url: str, model: str) -> Uses:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    responses = client.responses

    def chat(**fields: Any) -> Any:
        return client.chat.completions.create(model=model, messages=ASKED, **{"max_tokens": 100, **fields})

    def respond(**fields: Any) -> Any:
        return responses.create(model=model, input=QUESTION, **{"max_output_tokens": 100, **fields})

    def complete(**fields: Any) -> Any:
        return client.completions.create(model=model, prompt="The sky", **fields)

    def streamed_call() -> None:
        forced: Any = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 100}
        with client.chat.completions.stream(model=model, messages=ASKED, **forced) as stream:
            final = stream.get_final_completion()
        need_call(final.choices[0].message.tool_calls)

    def streamed_response() -> None:
        with responses.stream(model=model, input=QUESTION, text_format=Cat) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == need(stream.get_final_response().output_text)

    return {
        "models": lambda: client.models.retrieve(client.models.list().data[0].id),
        "chat": lambda: need(chat(max_tokens=SHORT).choices[0].message.content),
        "chat, streamed": lambda: need([*chat(max_tokens=SHORT, stream=True)]),
        "chat, hints": lambda: chat(max_tokens=2, reasoning_effort="low", verbosity="low", store=True),
        "chat, json_object": lambda: chat(max_tokens=SHORT, response_format={"type": "json_object"}),
        "chat, parsed": lambda: need(
            client.chat.completions.parse(model=model, messages=ASKED, response_format=Cat).choices[0].message.parsed
        ),
        "chat, tools": lambda: chat(tools=TOOLS, max_tokens=SHORT),
        "chat, tool required": lambda: need_call(
            chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
        ),
        "chat, tool named": lambda: need_call(chat(tools=TOOLS, tool_choice=NAMED).choices[0].message.tool_calls),
        "chat, tool streamed": streamed_call,
        "completion, logprobs": lambda: complete(max_tokens=4, logprobs=2),
        "completion, echo and logprobs": lambda: complete(max_tokens=1, logprobs=1, echo=True),
        "response": lambda: need(respond(max_output_tokens=SHORT).output_text),
        "response, streamed": streamed_response,
        "response, parsed": lambda: need(responses.parse(model=model, input=QUESTION, text_format=Cat).output_parsed),
        "response, tool required": lambda: need_call(respond(tools=FLAT_TOOLS, tool_choice="required").output),
    }


def langchain(url: str, model: str) -> Uses:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    def chat(**fields: Any) -> Any:
        shared = {"base_url": url, "api_key": "none", "model": model, "max_retries": 0, "max_tokens": 100}
        return ChatOpenAI(**{**shared, **fields})

    def call(asked: Any, **fields: Any) -> None:
        found = need(asked.bind_tools([tool(weather)], **fields).invoke(QUESTION).tool_calls, "a call")
        assert {call["name"] for call in found} == {"weather"}

    def structured(**fields: Any) -> None:
        need(chat().with_structured_output(Cat, **fields).invoke(QUESTION))

    call_made = {"name": "weather", "args": {"city": "Paris"}, "id": "1"}
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call_made]), ToolMessage("sunny", tool_call_id="1")]
    short, counted = chat(max_tokens=SHORT), chat(max_tokens=SHORT, stream_usage=True)
    return {
        "invoke": lambda: need(short.invoke(QUESTION).content),
        "stream": lambda: need("".join(str(chunk.content) for chunk in short.stream(QUESTION))),
        "stream usage": lambda: need([each for each in counted.stream(QUESTION) if each.usage_metadata]),
        "batch": lambda: short.batch(["a", "b", "c"]),
        "structured output": structured,
        "structured output, function_calling": lambda: structured(method="function_calling"),
        "tools": lambda: short.bind_tools([tool(weather)]).invoke(QUESTION),
        "tools, any": lambda: call(chat(), tool_choice="any"),
        "tools, strict": lambda: call(chat(), strict=True, parallel_tool_calls=False, tool_choice="weather"),
        "tools, their results": lambda: short.bind_tools([tool(weather)]).invoke(history),
        "Responses API": lambda: need(chat(use_responses_api=True).invoke(QUESTION).text),
        "Responses API, tools": lambda: call(chat(use_responses_api=True), tool_choice="any"),
        "completion": lambda: OpenAI(base_url=url, api_key="none", model=model, max_tokens=8).invoke("The sky"),
    }


def instructor(url: str, model: str) -> Uses:
    import instructor as library
    from openai import OpenAI

    def cat(mode: Any = None, **fields: Any) -> Any:
        plain = OpenAI(base_url=url, api_key="none", max_retries=0)
        client = library.from_openai(plain) if mode is None else library.from_openai(plain, mode=mode)
        return client.chat.completions.create(model=model, response_model=Cat, messages=ASKED, max_retries=0, **fields)

    def partial() -> None:
        client = library.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0))
        *_, last = client.chat.completions.create_partial(model=model, response_model=Cat, messages=ASKED)
        assert last.colour in ("black", "white")

    return {
        "create": cat,
        "create_partial": partial,
        "JSON_SCHEMA": lambda: cat(library.Mode.JSON_SCHEMA),
        "TOOLS_STRICT": lambda: cat(library.Mode.TOOLS_STRICT),
        "RESPONSES_TOOLS": lambda: cat(library.Mode.RESPONSES_TOOLS),
    }


def pydantic_ai(url: str, model: str) -> Uses:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")

    def uses(chat: Any) -> Uses:
        short: Any = {"max_tokens": SHORT}

        async def stream() -> None:
            async with Agent(chat, model_settings=short).run_stream(QUESTION) as answer:
                need([text async for text in answer.stream_text()])

        return {
            "text": lambda: need(Agent(chat, model_settings=short).run_sync(QUESTION).output),
            "stream": lambda: asyncio.run(stream()),
            "output type": lambda: need(Agent(chat, output_type=Cat).run_sync(QUESTION).output),
            "tools": lambda: need(Agent(chat, tools=[weather], model_settings=short).run_sync(QUESTION).output),
        }

    kinds: Any = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
    models = {name: kind(model, provider=provider) for name, kind in kinds.items()}
    return {f"{name}, {what}": use for name, chat in models.items() for what, use in uses(chat).items()}


def openai_agents(url: str, model: str) -> Uses:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    brief = {"structured_outputs": {"choice": ["Sunny."]}}  # this library raises an error for an answer that is cut off

    def connect() -> Any:
        return AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    def agent(**fields: Any) -> Any:
        settings = agents.ModelSettings(**{"extra_body": brief, **fields.pop("settings", {})})
        return agents.Agent(**{"name": "helper", "model": model, "model_settings": settings, **fields})

    def run(agent: Any, given: Any = QUESTION) -> Any:
        agents.set_default_openai_client(connect(), use_for_tracing=False)
        return need(agents.Runner.run_sync(agent, given, max_turns=3).final_output)

    async def stream() -> None:
        agents.set_default_openai_client(connect(), use_for_tracing=False)
        running = agents.Runner.run_streamed(agent(), QUESTION)
        need([event async for event in running.stream_events()])
        need(running.final_output)

    tools: Any = [agents.function_tool(weather)]
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'}
    history = [*ASKED, call, {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}]
    once: Any = {"tools": tools, "tool_use_behavior": "stop_on_first_tool"}
    return {
        "run": lambda: run(agent()),
        "run, streamed": lambda: asyncio.run(stream()),
        "output type": lambda: run(agent(output_type=Cat, settings={"extra_body": None})),
        "tools": lambda: run(agent(tools=tools)),
        "tool required": lambda: run(agent(**once, settings={"tool_choice": "required", "extra_body": None})),
        "tool named, not parallel": lambda: run(
            agent(**once, settings={"tool_choice": "weather", "parallel_tool_calls": False, "extra_body": None})
        ),
        "tool, its result": lambda: run(agent(tools=tools), history),
        "chat completions": lambda: run(agent(model=agents.OpenAIChatCompletionsModel(model, connect()), tools=tools)),
    }


def smolagents(url: str, model: str) -> Uses:
    import smolagents as library

    chat = library.OpenAIModel(model_id=model, api_base=url, api_key="none", max_tokens=100)

    def run(kind: Any) -> None:
        """What the model writes is of no use; only errors of the server count."""
        agent = kind(tools=[library.tool(described)], model=chat, max_steps=2, verbosity_level=0)
        agent.run(QUESTION)
        failed = [step.error for step in agent.memory.steps if getattr(step, "error", None) is not None]
        assert not [error for error in failed if isinstance(error, library.AgentGenerationError)], failed

    def described(city: str) -> str:
        """The weather in a city.

        Args:
            city: The name of the city.
        """
        return f"sunny in {city}"

    return {
        "model": lambda: need(chat([{"role": "user", "content": QUESTION}]).content),
        "ToolCallingAgent": lambda: run(library.ToolCallingAgent),
        "CodeAgent": lambda: run(library.CodeAgent),
    }


def litellm(url: str, model: str) -> Uses:
    import litellm as library

    shared: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}

    def chat(**fields: Any) -> Any:
        return library.completion(messages=ASKED, **shared, **{"max_tokens": 100, **fields})

    def message(**fields: Any) -> Any:
        return chat(**fields).choices[0].message

    return {
        "completion": lambda: need(message(max_tokens=SHORT).content),
        "completion, streamed": lambda: need([*chat(max_tokens=SHORT, stream=True)]),
        "completion, schema": lambda: Cat.model_validate_json(message(response_format=Cat).content),
        "completion, tool required": lambda: need_call(message(tools=TOOLS, tool_choice="required").tool_calls),
        "text_completion": lambda: library.text_completion(
            model=f"text-completion-openai/{model}", prompt="The sky", api_base=url, api_key="none", max_tokens=8
        ),
        "responses": lambda: need(library.responses(input=QUESTION, max_output_tokens=SHORT, **shared).output),
    }


CLIENTS = {
    "openai": openai,
    "langchain-openai": langchain,
    "instructor": instructor,
    "pydantic-ai": pydantic_ai,
    "openai-agents": openai_agents,
    "smolagents": smolagents,
    "litellm": litellm,
}


def main() -> None:
    name, url, model, *_ = sys.argv[1:]
    os.environ.setdefault("OPENAI_API_KEY", "none")
    failed = False
    for what, use in CLIENTS[name](url, model).items():
        try:
            use()
        except Exception as error:
            failed = True
            traceback.print_exc()
            print(f"FAIL {what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        else:
            print(f"ok {what}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
