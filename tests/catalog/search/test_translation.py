"""Translation of queries: supported languages, unchanged queries, and search results."""

import re
from pathlib import Path

import pytest

from catalog.search import translation
from catalog.search.engine import search
from catalog.search.index import Index, Searchable
from catalog.search.tokenizer import tokenize_query


def translate(query, is_indexed=lambda word: True, unknown=None):
    spellings = list(tokenize_query(query).values())
    unknown = spellings if unknown is None else unknown
    translated = translation.translate(query, spellings, unknown, is_indexed)
    return translated.text if translated else None


def tool(name, description):
    server, _, own = name.partition("__")
    return Searchable(name, own, server, "", description, "", ())


INDEX = Index(
    [
        tool("disk__remove", "Remove a file from a folder."),
        tool("disk__write", "Write text to a file."),
        tool("sky__forecast", "Weather forecast for a city."),
        tool("post__send", "Send a mail to somebody."),
        tool("shop__pay", "Pay an invoice."),
        tool("units__length", "Convert a length in feet or meters."),
        tool("viaje__trenes", "Busca trenes y compra el billete del viaje."),
    ]
)


@pytest.mark.parametrize(
    ("query", "english"),
    [
        ("longitud en pies", "length foot"),
        ("Envía un correo a Ana", "send mail a Ana"),
        ("borrar los archivos de /tmp/a.txt", "delete file /tmp/a.txt"),
        ("supprimer le fichier /tmp/le/la.txt", "delete file /tmp/le/la.txt"),
        ("Wettervorhersage für morgen", "weather forecast tomorrow"),
        ("Dateien löschen und eine Rechnung bezahlen", "file delete and invoice pay"),
        ("Straße auf der Landkarte", "street map"),
        ("cherche l’image de la voiture", "search image car"),
        ("mot de passe, puis rendez-vous", "password, then meeting"),
        ("帮我搜索附近的餐厅", "search near restaurant"),
        ("把文件发送到 ana@example.com，然后删除", "file send ana@example.com， then delete"),
        ("为 Berlin 预订酒店 3 晚", "Berlin book hotel 3 night"),
    ],
)
def test_a_query_in_another_language_is_translated_word_by_word(query, english):
    assert translate(query) == english


@pytest.mark.parametrize(
    "query",
    [
        "create an issue in a repository",
        "hotel in Los Angeles",
        "tag a release",
        "what kind of media is this",
        "red alert",
        "die roll",
        "a pie chart of sales",
        "analyse the texts and images of these pages",
        "list names, types and details of all systems",
        "generate moderate content",
        "El Paso weather",
        "which of these tools knows what the word archivo means",
        "xyzzy",
        "ねこを飼う",
        "고슴도치",
        "",
        "42 / 7",
    ],
)
def test_english_and_unknown_queries_are_unchanged(query):
    assert translate(query) is None


def test_a_query_of_indexed_words_is_unchanged():
    assert translate("archivo", unknown=[]) is None


def test_of_several_meanings_the_first_indexed_one_is_used():
    assert translate("eliminar", {"remove"}.__contains__) == "remove"
    assert translate("eliminar", {"delete", "remove"}.__contains__) == "delete"
    assert translate("eliminar", set().__contains__) == "delete"


@pytest.mark.parametrize("strategy", ["bm25", "hybrid"])
@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("eliminar archivos", "disk__remove"),
        ("pronóstico del tiempo", "sky__forecast"),
        ("longitud en pies", "units__length"),
        ("eine Datei entfernen", "disk__remove"),
        ("Wettervorhersage", "sky__forecast"),
        ("Rechnungen bezahlen", "shop__pay"),
        ("supprimer un fichier", "disk__remove"),
        ("envoyer un courriel", "post__send"),
        ("prévisions météo", "sky__forecast"),
        ("删除文件", "disk__remove"),
        ("天气预报", "sky__forecast"),
        ("支付发票", "shop__pay"),
    ],
)
def test_tools_described_in_english_are_found_in_other_languages(query, name, strategy):
    assert search(INDEX, query=query, strategy=strategy).hits[0].name == name


def test_an_indexed_foreign_word_is_searched_for_unchanged():
    hits = search(INDEX, query="busca trenes baratos para el viaje", strategy="bm25").hits

    assert hits[0].name == "viaje__trenes"
    assert {"busca", "viaje"} <= set(hits[0].matched)


def test_indexed_chinese_characters_are_searched_for_unchanged():
    index = Index([tool("a__tenki", "天気を調べる"), tool("b__day", "Tell the day of a date.")])

    assert "a__tenki" in [hit.name for hit in search(index, query="天気文件").hits]


def test_reasons_show_the_translation_of_a_word():
    hit = search(INDEX, query="eliminar archivos").hits[0]

    assert hit.reasons == ("“eliminar” → “remov”", "“archivos” → “file”")
    assert hit.matched == ("remov", "file")


@pytest.mark.parametrize("query", ["terremoto y fútbol", "фрукты", "地震"])
def test_a_foreign_query_without_results_recommends_english(query):
    result = search(INDEX, query=query, strategy="bm25")

    assert (result.hits, result.total) == ((), 0)
    assert result.note == "Tool descriptions may be in English. Try an English query."


def test_an_english_query_without_results_has_no_note():
    assert search(INDEX, query="earthquake… ?!", strategy="bm25").note == ""


SCRIPTS = {
    "glossary.txt": {3: "[\u3400-\u9fff]+"},
    "glossary_more.txt": {2: "[\u3005\u3040-\u30ff\u3400-\u9fffE]+", 3: "[\uac00-\ud7a3]+"},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_line_of_the_glossary_has_a_word_in_each_language(name):
    file = Path(translation.__file__).with_name(name)
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith(("#", translation.ENGLISH_MARK)):
            english, *others = (cell.split() for cell in line.split("|"))
            assert english, line
            assert len(others) == 4, line
            assert all(others), line
            for column, script in SCRIPTS[name].items():
                assert all(map(re.compile(script).fullmatch, others[column])), line


@pytest.mark.parametrize(
    ("query", "english"),
    [
        ("enviar uma mensagem", "send message"),
        ("previsão do tempo para amanhã", "forecast weather tomorrow"),
        ("cercare voli per domani", "search flight tomorrow"),
        ("mostrami le fatture", "show invoice"),
        ("天気を検索してください", "weather search"),
        ("ファイルを削除", "file delete"),
        ("파일을 삭제해줘", "file delete"),
        ("내일 날씨 예보", "tomorrow weather forecast"),
        ("reembolsar a assinatura", "refund subscription"),
        ("riavvia il contenitore", "restart container"),
        ("下書きを転送", "draft forward"),
        ("채널에 답장", "channel reply"),
        ("recomende ferramentas de marketing", "recommend tool marketing"),
        ("quali rischi ha questo mercato", "risk market"),
        ("契約書の期限を確認", "contract deadline check"),
        ("학생의 점수를 확인", "student score check"),
    ],
)
def test_portuguese_italian_japanese_and_korean_are_translated(query, english):
    assert translate(query) == english


@pytest.mark.parametrize(
    "query",
    [
        "come to the data center",
        "per user rate",
        "do not compare no two files",
        "a video site",
        "set an alarm for cores",
        "local journal transcription",
        "active panel of the canal camera",
        "persona of the responder",
        "todos in the reception",
        "concerto in a studio in the usa",
    ],
)
def test_english_words_of_the_new_languages_leave_english_alone(query):
    assert translate(query) is None


def test_a_listed_word_takes_precedence_over_an_inflected_form():
    german = translation.GLOSSARY.spaced[translation.GERMAN].english

    assert german["seite"] == ("page",)
    assert german["fehler"] == ("error",)
