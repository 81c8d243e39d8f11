package extproctest

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// fields are the headers or trailers of a message as Envoy sees them: lower-case names, HTTP/2's pseudo-headers among them.
type fields map[string][]string

func fieldsOf(h http.Header) fields {
	f := make(fields, len(h)+4)
	for k, v := range h {
		f[strings.ToLower(k)] = slices.Clone(v)
	}
	return f
}

func (f fields) get(name string) string {
	if v := f[name]; len(v) > 0 {
		return v[0]
	}
	return ""
}

func (f fields) set(name, value string) { f[name] = []string{value} }

// length returns the content-length, -1 without one.
func (f fields) length() int64 {
	if n, err := strconv.ParseInt(f.get("content-length"), 10, 64); err == nil && n >= 0 {
		return n
	}
	return -1
}

// header is f as net/http has it: pseudo-headers and content-length live elsewhere.
func (f fields) header() http.Header {
	h := make(http.Header, len(f))
	for k, v := range f {
		if !strings.HasPrefix(k, ":") {
			h[http.CanonicalHeaderKey(k)] = v
		}
	}
	return h
}

// proto is f on the wire: values in raw_value, pseudo-headers first.
func (f fields) proto() *corepb.HeaderMap {
	m := new(corepb.HeaderMap)
	for _, pseudo := range []bool{true, false} {
		for _, k := range slices.Sorted(maps.Keys(f)) {
			if strings.HasPrefix(k, ":") != pseudo {
				continue
			}
			for _, v := range f[k] {
				m.Headers = append(m.Headers, &corepb.HeaderValue{Key: k, RawValue: []byte(v)})
			}
		}
	}
	return m
}

// mutate applies m as Envoy does, measured on 1.40: removals come first; a value replaces what is there unless append is
// true, and append_action has no effect; fixed names cannot be touched. It reports what it refused through refused. An
// invalid name or value ends the mutation with false.
func (f fields) mutate(m *extprocpb.HeaderMutation, fixed func(name string) bool, refused func(format string, args ...any)) bool {
	for _, name := range m.GetRemoveHeaders() {
		if name = strings.ToLower(name); !strings.HasPrefix(name, ":") && name != "host" {
			delete(f, name)
		}
	}
	for _, o := range m.GetSetHeaders() {
		name, value := strings.ToLower(o.GetHeader().GetKey()), string(o.GetHeader().GetRawValue())
		switch {
		case !validName(name) || strings.ContainsAny(value, "\r\n\x00"):
			refused("header %q is invalid: it and those behind it are dropped", name)
			return false
		case fixed(name):
			refused("header %q cannot be set", name)
			continue
		case value == "" && o.GetHeader().GetValue() != "":
			refused("header %q has a value instead of a raw_value: it is sent empty", name)
		}
		//lint:ignore SA1019 it is the field that Envoy reads
		if o.GetAppend().GetValue() {
			f[name] = append(f[name], value)
		} else {
			f.set(name, value)
		}
	}
	return true
}

// What the server cannot set: see HeaderMutation in external_processor.proto.
func fixedInMessage(name string) bool {
	switch name {
	case ":method", ":authority", ":scheme", "host", "transfer-encoding", "connection":
		return true
	}
	return strings.HasPrefix(name, "x-envoy-")
}

func fixedInLocalReply(name string) bool {
	return strings.HasPrefix(name, ":") || name == "content-length" || fixedInMessage(name)
}

// validName reports whether name is a token of RFC 9110, or a pseudo-header.
func validName(name string) bool {
	name = strings.TrimPrefix(name, ":")
	return name != "" && strings.IndexFunc(name, func(r rune) bool {
		return !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || strings.ContainsRune("!#$%&'*+-.^_`|~", r))
	}) < 0
}
