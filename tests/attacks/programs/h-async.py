import asyncio, contextvars
factor = contextvars.ContextVar("factor", default=0)

async def main():
    loop = asyncio.get_running_loop()
    n = int(await loop.run_in_executor(None, input))
    queue = asyncio.Queue()

    async def produce():
        factor.set(1)
        await asyncio.sleep(0.01)
        await queue.put(n + factor.get())

    async with asyncio.TaskGroup() as group, asyncio.timeout(2):
        group.create_task(produce())
        print(await queue.get())

asyncio.run(main())
