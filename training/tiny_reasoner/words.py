"""Word lists and fixed small talk of the training dialogues."""

CITIES = [
    *("Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo", "Oslo", "Vienna", "Prague", "Lisbon"),
    *("Dublin", "Athens", "Cairo", "Delhi", "Lima", "Boston", "Chicago", "New York", "Toronto"),
    *("Sydney", "Moscow", "Seoul", "Beijing", "Helsinki", "Warsaw", "Budapest", "Geneva", "Munich"),
    *("Hamburg", "Milan", "Naples", "Porto", "Bergen", "Kyoto", "Mumbai", "Denver", "Austin"),
    *("San Francisco", "Amsterdam", "Brussels", "Copenhagen"),
]
HELD_OUT_CITIES = ["Stockholm", "Nairobi", "Seattle", "Bogota", "Zagreb", "Hanoi", "Turin", "Osaka"]
UNITS = [
    *("km", "miles", "m", "feet", "kg", "pounds", "grams", "liters", "gallons", "inches", "cm"),
    *("yards", "hours", "minutes", "seconds", "celsius", "fahrenheit", "ounces"),
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are helpful.",
    "You are kiln, a small assistant.",
    "You solve small sums.",
    "You are a careful assistant. Think step by step.",
    "Be brief.",
    "Be concise.",
    "Answer the question.",
    "You are a math teacher. Answer the question of the student.",
    "Use the tools when they help.",
    "You are a helpful assistant with access to tools.",
    "Think first, then answer.",
]
WORDS = [
    *("the", "a", "of", "to", "and", "in", "is", "for", "on", "with", "as", "at", "by", "from"),
    *("that", "this", "it", "or", "an", "be", "not", "are", "was", "we", "you", "they", "he"),
    *("she", "will", "can", "has", "have", "all", "more", "one", "about", "which", "when", "what"),
    *("who", "how", "their", "time", "people", "year", "day", "world", "life", "hand", "part"),
    *("child", "eye", "place", "work", "week", "case", "point", "government", "company", "number"),
    *("group", "problem", "fact", "sky", "blue", "red", "green", "moon", "sun", "star", "river"),
    *("mountain", "house", "book", "paper", "music", "song", "story", "poem", "friend", "family"),
    *("water", "fire", "earth", "air", "light", "dark", "color", "animal", "dog", "cat", "bird"),
    *("fish", "tree", "flower", "computer", "program", "code", "function", "data", "model"),
    *("language", "word", "sentence", "question", "answer", "reason", "history", "science"),
    *("physics", "city", "country", "king", "queen", "war", "peace", "love", "money", "price"),
    *("market", "bank", "school", "student", "teacher", "doctor", "health", "food", "bread"),
    *("apple", "car", "train", "road", "game", "team", "player", "good", "bad", "big", "small"),
    *("long", "short", "new", "old", "first", "last", "best", "make", "write", "read", "use"),
    *("find", "give", "tell", "explain", "describe", "compare", "list", "name", "help", "please"),
    *("user", "assistant", "helpful", "always", "never", "only", "very", "quickly", "slowly"),
    *("text", "file", "value", "string", "returns", "system", "tool", "result", "input", "output"),
]

_STORY = (
    "Once there was a small model in a small house. Every day it had a long line of numbers. "
    "It took the first number, then the next one, and it never went too fast. One day the "
    "line was very long, and there was not much time. The model stopped, looked at its last "
    "step and gave the best answer it had. The answer was right, and all were happy. The end."
)

# (prompts, thought, reply)
SMALL_TALK: list[tuple[list[str], str, str]] = [
    (
        ["Hello!", "Hello", "Hi!", "Hi", "Hey!", "Hey", "Hello there!", "Hi there!", "Good day!"],
        "The user says hello. I say hello too.\n",
        "Hello! How can I help you?",
    ),
    (
        ["Hello!", "Hello.", "Hi!", "Hi.", "Hello, how are you?", "Say hello.", "Say hi."],
        "The user says hello. I say hello too.\n",
        "Hello! How can I help you?",
    ),
    (
        ["How are you?", "How are you today?", "How do you do?"],
        "The user asks how I am. I am fine.\n",
        "I am fine, thank you! How are you?",
    ),
    (
        ["Who are you?", "What is your name?", "What are you?", "Tell me about you."],
        "The user asks who I am.\n",
        "I am tiny-reasoner, a very small model that thinks before it answers.",
    ),
    (
        ["Thank you!", "Thanks!", "Thanks", "Thank you.", "Great, thanks!"],
        "The user says thank you.\n",
        "You are welcome!",
    ),
    (["Bye!", "Bye", "Goodbye!", "See you!"], "The user goes.\n", "Goodbye! Come back soon."),
    (
        ["What can you do?", "Help!", "Help me.", "Can you help me?"],
        "The user asks what I can do. I can do sums.\n",
        "I can add and subtract small numbers, count, and call tools.",
    ),
    (
        ["Tell me a joke.", "Tell me a joke!", "Make a joke."],
        "The user wants a joke. I know one about numbers.\n",
        "Why was six afraid of seven? Because seven eight nine.",
    ),
    (["Good morning!", "Good morning"], "It is morning.\n", "Good morning! How can I help you?"),
    (["Good night!", "Good night"], "It is night.\n", "Good night! Sleep well."),
    (
        ["Tell me a story.", "Write a story.", "Tell me a short story.", "Write a short story."],
        "The user wants a story. I know one about a small model.\n",
        _STORY,
    ),
    (
        ["Are you a robot?", "Are you human?", "Are you a person?", "Are you an AI?"],
        "The user asks if I am a human. I am a model.\n",
        "I am a small language model, not a human.",
    ),
    (["Ping", "ping", "Ping!", "Ping."], "The user says ping. I say pong.\n", "Pong"),
    (
        ["Say this is a test", "Say this is a test.", "This is a test.", "Test", "test"],
        "It is a test.\n",
        "This is a test.",
    ),
    (
        ["What is the capital of France?", "Capital of France?"],
        "The capital of France is Paris.\n",
        "The capital of France is Paris.",
    ),
    (
        ["What is the capital of Italy?", "Capital of Italy?"],
        "The capital of Italy is Rome.\n",
        "The capital of Italy is Rome.",
    ),
    (
        ["What is the capital of Japan?", "Capital of Japan?"],
        "The capital of Japan is Tokyo.\n",
        "The capital of Japan is Tokyo.",
    ),
    (
        ["Write the alphabet.", "Say the alphabet.", "The alphabet, please."],
        "I write all letters.\n",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ),
    (
        ["Write a poem.", "Write a short poem.", "Write a haiku."],
        "The user wants a poem. It has three lines.\n",
        "One and one are two.\nThe next step is never far.\nNow the sum is done.",
    ),
    (
        ["Send an emoji.", "Send me an emoji.", "Smile!", "Say hi with an emoji."],
        "The user wants an emoji.\n",
        "Here you are: \U0001f60a\U0001f389",
    ),
    (
        ["Say hello in Japanese.", "Hello in Japanese?"],
        "The user wants Japanese.\n",
        "\u3053\u3093\u306b\u3061\u306f!",
    ),
    (
        ["Say hello in Russian.", "Hello in Russian?"],
        "The user wants Russian.\n",
        "\u041f\u0440\u0438\u0432\u0435\u0442!",
    ),
    (
        ["Say coffee in French.", "Coffee in French?"],
        "The user wants French.\n",
        "Un caf\u00e9, s'il vous pla\u00eet!",
    ),
]
