//! What `MessageId` promises: which inputs are the same message, which are not, and which are none.

use inbox_core::uuid::{self, Uuid};
use inbox_core::{ErrorKind, MessageId};
use proptest::collection::vec;
use proptest::prelude::*;

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(512)
    }
}

/// Text that is not blank.
fn name() -> impl Strategy<Value = String> {
    any::<String>().prop_filter("blank", |text| text.chars().any(|c| !c.is_whitespace() && c != '\0'))
}

/// A part of an id: few letters, so that different lists often have the same concatenation.
fn part() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        "[ab]{1,4}".prop_map(String::into_bytes),
        vec(prop_oneof![Just(0_u8), Just(1), Just(b'a')], 0..10).prop_map(|mut bytes| {
            bytes.push(b'a');
            bytes
        }),
        vec(any::<u8>(), 0..20).prop_map(|mut bytes| {
            bytes.push(b'x');
            bytes
        }),
    ]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_same_text_is_the_same_message(text in name()) {
        let id = MessageId::new(&text).unwrap();
        prop_assert_eq!(MessageId::new(&text).unwrap(), id);
        prop_assert_eq!(text.parse::<MessageId>().unwrap(), id);
        prop_assert_eq!(MessageId::try_from(text.as_str()).unwrap(), id);
    }

    #[test]
    fn text_and_its_bytes_are_one_message(text in any::<String>()) {
        prop_assert_eq!(
            MessageId::from_bytes(text.as_bytes()).map_err(|e| e.to_string()),
            MessageId::new(&text).map_err(|e| e.to_string())
        );
    }

    #[test]
    fn different_texts_are_different_messages(one in name(), other in name()) {
        prop_assert_eq!(MessageId::new(&one).unwrap() == MessageId::new(&other).unwrap(), one == other);
    }

    #[test]
    fn one_changed_bit_is_another_message(bytes in vec(any::<u8>(), 1..64), bit in any::<prop::sample::Index>()) {
        let bit = bit.index(bytes.len() * 8);
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        if let (Ok(one), Ok(other)) = (MessageId::from_bytes(&bytes), MessageId::from_bytes(&changed)) {
            prop_assert_ne!(one, other);
        }
    }

    #[test]
    fn the_same_parts_are_the_same_message(parts in vec(part(), 1..6)) {
        prop_assert_eq!(MessageId::from_parts(&parts).unwrap(), MessageId::from_parts(parts.clone()).unwrap());
    }

    #[test]
    fn different_lists_of_parts_are_different_messages(one in vec(part(), 1..6), other in vec(part(), 1..6)) {
        prop_assert_eq!(
            MessageId::from_parts(&one).unwrap() == MessageId::from_parts(&other).unwrap(),
            one == other
        );
    }

    #[test]
    fn parts_cut_elsewhere_are_another_message(
        bytes in vec(prop_oneof![Just(b'a'), Just(b'b')], 2..12),
        cuts in vec(any::<prop::sample::Index>(), 2),
    ) {
        let (one, other) = (1 + cuts[0].index(bytes.len() - 1), 1 + cuts[1].index(bytes.len() - 1));
        let cut = |at: usize| MessageId::from_parts([&bytes[..at], &bytes[at..]]).unwrap();
        prop_assert_eq!(cut(one) == cut(other), one == other);
        prop_assert_ne!(cut(one), MessageId::from_parts([&bytes]).unwrap());
    }

    /// The hardest case for unambiguous parts: contents that imitate the lengths between them.
    #[test]
    fn a_part_that_imitates_two_parts_is_another_message(one in part(), other in part()) {
        let mut joined = one.clone();
        joined.extend_from_slice(&(other.len() as u64).to_be_bytes());
        joined.extend_from_slice(&other);
        prop_assert_ne!(MessageId::from_parts([&joined]).unwrap(), MessageId::from_parts([&one, &other]).unwrap());
    }

    #[test]
    fn parts_are_never_the_message_of_their_joined_text(parts in vec(name(), 1..5)) {
        let id = MessageId::from_parts(&parts).unwrap();
        prop_assert_ne!(id, MessageId::new(parts.concat()).unwrap());
        let mut prefixed = Vec::new();
        for part in &parts {
            prefixed.extend_from_slice(&(part.len() as u64).to_be_bytes());
            prefixed.extend_from_slice(part.as_bytes());
        }
        prop_assert_ne!(id, MessageId::from_bytes(&prefixed).unwrap());
    }

    #[test]
    fn a_hyphenated_uuid_text_in_any_case_is_that_uuid(number in 1_u128.., upper in vec(any::<bool>(), 36)) {
        let uuid = Uuid::from_u128(number);
        let text: String = uuid
            .hyphenated()
            .to_string()
            .chars()
            .zip(upper)
            .map(|(c, upper)| if upper { c.to_ascii_uppercase() } else { c })
            .collect();
        let id = MessageId::new(&text).unwrap();
        prop_assert_eq!(id.as_uuid(), uuid);
        prop_assert_eq!(id, MessageId::from_uuid(uuid).unwrap());
        prop_assert_eq!(id, MessageId::from_bytes(text).unwrap());
        prop_assert_eq!(id.as_bytes(), &number.to_be_bytes());
    }

    #[test]
    fn any_other_text_is_its_uuid_v5_in_the_namespace(text in name()) {
        let id = MessageId::new(&text).unwrap();
        prop_assert_eq!(id.as_uuid(), Uuid::new_v5(&MessageId::NAMESPACE, text.as_bytes()));
        prop_assert_eq!(id.as_uuid().get_version_num(), 5);
    }

    /// 36 bytes long like a UUID, of its letters, and none.
    #[test]
    fn text_that_looks_like_a_uuid_and_is_none_is_a_name(text in "[0-9a-fA-F-]{36}") {
        let hyphens: Vec<usize> = text.match_indices('-').map(|(at, _)| at).collect();
        prop_assume!(hyphens != [8, 13, 18, 23]);
        let id = MessageId::new(&text).unwrap();
        prop_assert_eq!(id.as_uuid(), Uuid::new_v5(&MessageId::NAMESPACE, text.as_bytes()));
    }

    #[test]
    fn other_spellings_of_a_uuid_are_names(number in 1_u128..) {
        let uuid = Uuid::from_u128(number);
        for text in [uuid.simple().to_string(), uuid.braced().to_string(), uuid.urn().to_string(), format!(" {uuid}")] {
            let id = MessageId::new(&text).unwrap();
            prop_assert_eq!(id.as_uuid(), Uuid::new_v5(&MessageId::NAMESPACE, text.as_bytes()));
        }
    }

    #[test]
    fn sixteen_raw_bytes_are_a_name_and_not_a_uuid(number in 1_u128..) {
        let bytes = number.to_be_bytes();
        if let Ok(id) = MessageId::from_bytes(bytes) {
            prop_assert_ne!(id.as_uuid(), Uuid::from_bytes(bytes));
            prop_assert_eq!(id.as_uuid(), Uuid::new_v5(&MessageId::NAMESPACE, &bytes));
        }
    }

    #[test]
    fn an_id_prints_as_the_text_that_names_it(text in name()) {
        let id = MessageId::new(text).unwrap();
        prop_assert_eq!(MessageId::new(id.to_string()).unwrap(), id);
        prop_assert_eq!(format!("{id:?}"), format!("MessageId({id})"));
    }
}

/// RFC 9562, appendix A.4, and the example of Python's documentation of `uuid.uuid5`.
#[test]
fn uuid_v5_agrees_with_the_published_examples() {
    let dns = Uuid::NAMESPACE_DNS;
    for (name, published) in [
        ("www.example.com", "2ed6657d-e927-568b-95e1-2665a8aea6a2"),
        ("python.org", "886313e1-3b8a-5372-9b90-0c9aee199e5d"),
    ] {
        assert_eq!(Uuid::new_v5(&dns, name.as_bytes()).to_string(), published, "{name}");
    }
}

#[test]
fn the_namespaces_are_the_documented_derivations() {
    let url = Uuid::NAMESPACE_URL;
    assert_eq!(url.to_string(), "6ba7b811-9dad-11d1-80b4-00c04fd430c8");
    for (namespace, urn, python) in [
        (
            MessageId::NAMESPACE,
            "urn:inbox-pattern:message-id",
            "87904c99-a651-5c30-9eef-33135db32528",
        ),
        (
            MessageId::PARTS_NAMESPACE,
            "urn:inbox-pattern:message-id:parts",
            "7d49bede-15d7-5495-99fd-e50823e20364",
        ),
    ] {
        assert_eq!(namespace, Uuid::new_v5(&url, urn.as_bytes()), "{urn}");
        // python3 -c 'import uuid; print(uuid.uuid5(uuid.NAMESPACE_URL, URN))'
        assert_eq!(namespace.to_string(), python, "{urn}");
    }
}

/// Computed by Python 3, which knows nothing of this crate:
///
/// ```python
/// import uuid
/// namespace = uuid.uuid5(uuid.NAMESPACE_URL, "urn:inbox-pattern:message-id")
/// print(uuid.uuid5(namespace, TEXT))
/// ```
#[test]
fn ids_of_texts_are_those_that_another_implementation_computes() {
    let mebibyte = "x".repeat(1024 * 1024);
    for (text, python) in [
        ("order-17", "6ac9ff07-422e-59d5-ac85-f27032b2c5c2"),
        ("www.example.com", "343f61f4-0b4c-5040-bf3d-c2e9a052a893"),
        ("python.org", "41c5852e-1fed-5f7b-9ff5-ae58fe328c41"),
        ("x", "1f3ded48-0889-56c1-83ce-6b0a6e7607d4"),
        ("x ", "fe75ccdc-a7f8-5bf4-a12b-3f56b3f28a6f"),
        (" order-17", "0dffae34-64d6-588a-8d92-1be7b0779260"),
        ("A", "195ac4f3-a1c4-5734-9af0-c81a3897bd5c"),
        ("a", "52b64886-3874-56e1-8eb7-0411e04b802e"),
        ("e\u{301}", "3bdb69af-dafc-5f3c-ba29-ed77f41b63c7"),
        ("\u{e9}", "58e4e8f4-aac4-5f85-bb81-34b01b5de55e"),
        ("\u{1f980}", "c889a73a-ef86-538c-ac10-17968794101b"),
        ("a\0b", "38f2e10f-618c-58f2-a59e-c019f8b677fb"),
        ("'; DROP TABLE inbox_events; --", "6dda0ce3-3a04-571c-ab5d-16f95ee9c44b"),
        (
            "{e519b160-7c2d-400e-b105-586b05b70328}",
            "929b7e22-2e2f-570a-acbe-f25cd3a3485a",
        ),
        (
            "e519b1607c2d400eb105586b05b70328",
            "5df5d6fd-fde1-5690-9987-0f44151ef245",
        ),
        (mebibyte.as_str(), "194f4859-534c-538b-8610-140f506d92e2"),
    ] {
        let id = MessageId::new(text).unwrap();
        assert_eq!(id.to_string(), python, "{:?}", text.get(..40));
    }
}

/// Computed by Python 3, whose `uuid5` takes text only before 3.12:
///
/// ```python
/// import hashlib, uuid
/// namespace = uuid.uuid5(uuid.NAMESPACE_URL, "urn:inbox-pattern:message-id")
/// print(uuid.UUID(bytes=hashlib.sha1(namespace.bytes + BYTES).digest()[:16], version=5))
/// ```
#[test]
fn ids_of_bytes_are_those_that_another_implementation_computes() {
    let uuid_bytes = Uuid::from_u128(0xe519_b160_7c2d_400e_b105_586b_05b7_0328).into_bytes();
    for (bytes, python) in [
        (&[0xff, 0xfe][..], "7081f415-2964-5d02-9e5b-ebcada64a7e7"),
        (&uuid_bytes, "208d4533-cbcd-5827-a5de-03044ab437f2"),
    ] {
        assert_eq!(MessageId::from_bytes(bytes).unwrap().to_string(), python, "{bytes:x?}");
    }
}

/// Computed by Python 3:
///
/// ```python
/// import hashlib, struct, uuid
/// namespace = uuid.uuid5(uuid.NAMESPACE_URL, "urn:inbox-pattern:message-id:parts")
/// name = b"".join(struct.pack(">Q", len(part)) + part for part in PARTS)
/// print(uuid.UUID(bytes=hashlib.sha1(namespace.bytes + name).digest()[:16], version=5))
/// ```
#[test]
fn ids_of_parts_are_those_that_another_implementation_computes() {
    let parts: [(&[&[u8]], &str); 7] = [
        (&[b"a", b"bc"], "401ff08b-e311-59ab-9038-25fdac468c6d"),
        (&[b"ab", b"c"], "db875c5b-2521-5c39-b00d-f2c516bd2411"),
        (&[b"abc"], "7d30b8fa-c773-5dd3-86dc-c9d431f86fdc"),
        (&[b"orders", b"3", b"1042"], "300e3803-0aaa-5582-bc5b-5ed15f409fdb"),
        (
            &[b"https://example.com/cloudevents", b"A234-1234-1234"],
            "0de6f58a-5175-5ecb-879e-ba93eaa2f35c",
        ),
        (&[&[0xff], &[1]], "6566d3c8-27bc-5aba-9090-13a9bbf1aff7"),
        (
            &["\u{e9}".as_bytes(), "\u{1f980}".as_bytes()],
            "0d1f9c04-29c3-579b-98ef-dd1eeab3e97b",
        ),
    ];
    for (parts, python) in parts {
        assert_eq!(MessageId::from_parts(parts).unwrap().to_string(), python, "{parts:?}");
    }
}

#[test]
fn parts_are_kept_apart() {
    let ids = [
        MessageId::from_parts(["a", "bc"]).unwrap(),
        MessageId::from_parts(["ab", "c"]).unwrap(),
        MessageId::from_parts(["abc"]).unwrap(),
        MessageId::from_parts(["a", "b", "c"]).unwrap(),
        MessageId::new("abc").unwrap(),
    ];
    assert_all_differ(&ids);
}

#[test]
fn a_uuid_as_the_only_part_is_a_name_and_not_that_uuid() {
    let text = "e519b160-7c2d-400e-b105-586b05b70328";
    assert_ne!(
        MessageId::from_parts([text]).unwrap(),
        MessageId::new(text).unwrap(),
        "an id of parts is in a namespace of its own"
    );
}

#[test]
fn nothing_is_trimmed_folded_or_normalised() {
    let texts = [
        "x",
        "x ",
        " x",
        "x\t",
        "x\n",
        "x\0",
        "\0x",
        "X",
        "a\0b",
        "a\0c",
        "ab",
        "\u{e9}",
        "e\u{301}",
        "\u{fb01}",
        "fi",
        "\u{1f980}",
        "\u{1f980}\u{fe0f}",
        "'; DROP TABLE inbox_events; --",
        "'; drop table inbox_events; --",
        "%",
        "_",
        "\\",
        "\\\\",
        "{}",
        "{a}",
        "null",
        "0",
        "00",
        "-0",
    ];
    let ids: Vec<MessageId> = texts.iter().map(|text| MessageId::new(text).unwrap()).collect();
    assert_all_differ(&ids);
}

#[test]
fn all_of_a_long_text_counts() {
    let mut text = "x".repeat(1024 * 1024);
    let whole = MessageId::new(&text).unwrap();
    text.pop();
    let shorter = MessageId::new(&text).unwrap();
    text.push('y');
    let other_end = MessageId::new(&text).unwrap();
    assert_all_differ(&[whole, shorter, other_end]);
}

#[test]
fn a_uuid_is_itself_whatever_its_version_but_nil() {
    for uuid in [Uuid::max(), Uuid::from_u128(1), Uuid::NAMESPACE_DNS] {
        let id = MessageId::try_from(uuid).unwrap();
        assert_eq!(id.as_uuid(), uuid);
        assert_eq!(Uuid::from(id), uuid);
        assert_eq!(id.as_bytes(), uuid.as_bytes());
        assert_eq!(id.to_string(), uuid.hyphenated().to_string());
    }
}

#[test]
fn ids_sort_as_their_bytes_do() {
    let ids = [1_u128, 0xff, 0x100, u128::MAX].map(|n| MessageId::from_uuid(uuid::Uuid::from_u128(n)).unwrap());
    assert!(ids.is_sorted());
    assert!(ids.is_sorted_by_key(MessageId::as_bytes));
}

#[test]
fn what_stands_for_a_missing_id_is_refused_with_advice() {
    let nil = "00000000-0000-0000-0000-000000000000";
    let refused = [
        ("empty", MessageId::new("")),
        ("a space", MessageId::new(" ")),
        ("spaces", MessageId::new("    ")),
        ("tabs", MessageId::new("\t\t")),
        ("line ends", MessageId::new("\r\n")),
        ("a NUL", MessageId::new("\0")),
        ("NULs", MessageId::new("\0\0\0\0")),
        (
            "white space of every sort",
            MessageId::new(" \t\n\r\0\u{a0}\u{2003}\u{3000}"),
        ),
        ("nil text", MessageId::new(nil)),
        ("nil parsed", nil.parse()),
        ("nil bytes of text", MessageId::from_bytes(nil)),
        ("nil", MessageId::from_uuid(Uuid::nil())),
        ("nil converted", Uuid::nil().try_into()),
        ("no bytes", MessageId::from_bytes([])),
        ("blank bytes", MessageId::from_bytes(b" \t\0")),
        ("16 NUL bytes", MessageId::from_bytes([0; 16])),
        ("no parts", MessageId::from_parts::<&str>([])),
        ("an empty part", MessageId::from_parts([""])),
        ("a missing last part", MessageId::from_parts(["orders", "3", ""])),
        ("a missing first part", MessageId::from_parts(["", "orders"])),
        ("a blank part", MessageId::from_parts(["orders", " \t", "1"])),
        ("nil without hyphens", MessageId::new("0".repeat(32))),
        ("nil in braces", MessageId::new(format!("{{{nil}}}"))),
        ("nil as a URN", MessageId::new(format!("urn:uuid:{nil}"))),
    ];
    for (what, result) in refused {
        let error = result.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{what}");
        assert!(!error.is_retryable(), "{what}");
        let text = error.to_string();
        assert!(text.contains("missing message id"), "{what}: {text}");
        assert!(text.contains("have the producer set an id"), "{what}: {text}");
    }
}

#[test]
fn a_refusal_names_the_part_that_is_missing() {
    let error = MessageId::from_parts(["orders", "3", ""]).unwrap_err();
    assert!(error.to_string().contains("part 3"), "{error}");
}

#[test]
fn a_refusal_of_a_mebibyte_of_blanks_is_no_longer_than_a_few_lines() {
    for blank in [" ", "\0", "\u{3000}"] {
        let blanks = blank.repeat(1024 * 1024 / blank.len());
        let error = MessageId::new(&blanks).unwrap_err();
        assert!(error.to_string().len() < 1_000, "{} bytes", error.to_string().len());
        // NUL bytes are no blanks in a part, which may be a number in binary.
        let part = MessageId::from_parts([&blanks]).map_err(|error| error.to_string().len());
        assert_eq!(part.is_ok(), blank == "\0");
        assert!(part.err().unwrap_or(0) < 1_000, "{part:?} bytes");
    }
}

#[track_caller]
fn assert_all_differ(ids: &[MessageId]) {
    for (index, id) in ids.iter().enumerate() {
        for (other_index, other) in ids.iter().enumerate().skip(index + 1) {
            assert_ne!(id, other, "number {index} and number {other_index} of the list");
        }
    }
}

/// A Kafka offset as eight bytes is a part like any other, whatever its value.
#[test]
fn numbers_in_binary_are_parts_and_all_different() {
    let offsets = (0_u64..100).chain([8192, u64::MAX]);
    let ids: std::collections::BTreeSet<MessageId> = offsets
        .map(|offset| MessageId::from_parts([b"orders".as_slice(), &offset.to_be_bytes()]).unwrap())
        .collect();
    assert_eq!(ids.len(), 102);
}
