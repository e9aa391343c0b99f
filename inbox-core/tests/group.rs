//! What `ConsumerGroup` and `Key` promise: which names are accepted, and that they are compared byte for byte.

use std::collections::HashSet;

use inbox_core::{ConsumerGroup, Error, ErrorKind, Inbox, Key, MemoryInbox, MessageId};
use proptest::prelude::*;

#[track_caller]
fn assert_refused(name: &str, names_it: &str) -> Error {
    let Err(error) = ConsumerGroup::new(name) else {
        panic!("{:?} was accepted", name.get(..40).unwrap_or(name));
    };
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(!error.is_retryable());
    let text = error.to_string();
    assert!(text.contains("consumer group"), "{text}");
    assert!(text.contains(names_it), "{text}");
    assert!(
        text.len() < 1_000 && text.lines().count() <= 3,
        "{} bytes: {}",
        text.len(),
        &text[..200]
    );
    error
}

#[test]
fn names_of_1_to_255_bytes_are_accepted() {
    for bytes in 1..=ConsumerGroup::MAX_BYTES {
        let name = "g".repeat(bytes);
        let group = ConsumerGroup::new(&name).unwrap();
        assert_eq!(group.as_str(), name);
        assert_eq!(group.to_string(), name);
    }
    assert_eq!(ConsumerGroup::MAX_BYTES, 255);
}

#[test]
fn the_limit_is_in_bytes_and_not_in_characters() {
    ConsumerGroup::new("\u{e9}".repeat(127)).unwrap();
    assert_refused(&"\u{e9}".repeat(128), "256 bytes");
    ConsumerGroup::new("\u{1f980}".repeat(63)).unwrap();
    assert_refused(&"\u{1f980}".repeat(64), "256 bytes");
}

#[test]
fn longer_names_are_refused_with_their_length_and_the_limit() {
    for bytes in [256, 300, 65_536] {
        let error = assert_refused(&"g".repeat(bytes), &format!("{bytes} bytes"));
        assert!(error.to_string().contains("255"), "{error}");
        assert!(error.to_string().contains("\"gggg"), "{error}");
    }
}

#[test]
fn the_refusal_of_a_mebibyte_is_no_longer_than_a_few_lines() {
    for text in ["g", "\u{e9}", "\n", "\u{10ffff}"] {
        assert_refused(&text.repeat(1024 * 1024 / text.len()), "1048576 bytes");
    }
}

#[test]
fn an_empty_name_is_refused() {
    assert_refused("", "empty");
}

#[test]
fn control_characters_are_refused_wherever_they_stand_and_are_shown_escaped() {
    for control in ('\0'..='\u{1f}').chain('\u{7f}'..='\u{9f}') {
        let escaped = format!("{control:?}");
        for name in [
            format!("{control}billing"),
            format!("bill{control}ing"),
            format!("billing{control}"),
        ] {
            let error = assert_refused(&name, &escaped);
            assert!(!error.to_string().contains(control), "{error:?}");
        }
    }
}

#[test]
fn every_other_character_is_accepted() {
    for name in [
        " ",
        "billing ",
        "Rechnungs-Prüfung",
        "請求",
        "\u{1f980}",
        "a/b:c{d}'e\"f;g--h",
        "%",
        "*",
    ] {
        assert_eq!(ConsumerGroup::new(name).unwrap().as_str(), name);
    }
}

#[test]
fn names_are_compared_byte_for_byte() {
    let names = [
        "billing", "Billing", "billing ", " billing", "\u{e9}", "e\u{301}", "\u{fb01}", "fi",
    ];
    let groups: HashSet<ConsumerGroup> = names.iter().map(|name| ConsumerGroup::new(name).unwrap()).collect();
    assert_eq!(groups.len(), names.len());
    for name in names {
        assert!(groups.contains(&ConsumerGroup::new(name).unwrap()), "{name:?}");
    }
}

#[test]
fn every_conversion_checks_alike() {
    let long = "g".repeat(300);
    for name in ["", "a\nb", long.as_str()] {
        let expected = assert_refused(name, "consumer group").to_string();
        assert_eq!(name.parse::<ConsumerGroup>().unwrap_err().to_string(), expected);
        assert_eq!(ConsumerGroup::try_from(name).unwrap_err().to_string(), expected);
        assert_eq!(
            ConsumerGroup::try_from(name.to_owned()).unwrap_err().to_string(),
            expected
        );
        assert_eq!(Inbox::new(MemoryInbox::new(), name).unwrap_err().to_string(), expected);
        let inbox = Inbox::new(MemoryInbox::new(), "billing").unwrap();
        assert_eq!(inbox.for_group(name).unwrap_err().to_string(), expected);
    }
}

#[test]
fn an_inbox_takes_a_group_as_text_or_ready_made() {
    let ready = ConsumerGroup::new("billing").unwrap();
    for inbox in [
        Inbox::new(MemoryInbox::new(), "billing").unwrap(),
        Inbox::new(MemoryInbox::new(), String::from("billing")).unwrap(),
        Inbox::new(MemoryInbox::new(), ready.clone()).unwrap(),
        Inbox::new(MemoryInbox::new(), "shipping")
            .unwrap()
            .for_group("billing")
            .unwrap(),
    ] {
        assert_eq!(inbox.group(), &ready);
    }
}

#[test]
fn a_key_is_its_message_and_its_group() {
    let (billing, shipping) = (
        ConsumerGroup::new("billing").unwrap(),
        ConsumerGroup::new("shipping").unwrap(),
    );
    let (one, two) = (MessageId::new("1").unwrap(), MessageId::new("2").unwrap());
    let keys: HashSet<Key> = [(&billing, one), (&billing, two), (&shipping, one), (&shipping, two)]
        .into_iter()
        .map(|(group, id)| Key::new(group.clone(), id))
        .collect();
    assert_eq!(keys.len(), 4);
    let key = Key::new(billing.clone(), one);
    assert!(keys.contains(&key));
    assert_eq!((key.group(), key.id()), (&billing, one));
    assert_eq!(key.to_string(), format!("message {one} in group billing"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn a_name_is_accepted_exactly_if_it_has_1_to_255_bytes_and_no_control_character(
        name in prop_oneof!["\\PC{0,100}", ".{0,300}", any::<String>()],
    ) {
        let good = (1..=255).contains(&name.len()) && !name.chars().any(char::is_control);
        prop_assert_eq!(ConsumerGroup::new(&name).is_ok(), good);
    }

    #[test]
    fn groups_are_equal_exactly_if_their_names_are(one in "[aA ]{1,3}", other in "[aA ]{1,3}") {
        prop_assert_eq!(ConsumerGroup::new(&one).unwrap() == ConsumerGroup::new(&other).unwrap(), one == other);
    }
}
