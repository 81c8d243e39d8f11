package extproc_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
)

// A script is what a proxy does and what the server makes of it. Its bytes are read in
// order; at its end they are all 0.
type script []byte

func (s *script) byte() (b byte) {
	if len(*s) > 0 {
		b, *s = (*s)[0], (*s)[1:]
	}
	return b
}

// text takes a length and that many bytes.
func (s *script) text() []byte {
	n := min(int(s.byte()), len(*s))
	b := (*s)[:n:n]
	*s = (*s)[n:]
	return b
}

// The steps of a script: messages, and what else a proxy or another goroutine does.
const (
	stepRequestHeaders byte = iota
	stepRequestBody
	stepRequestTrailers
	stepEventStream // response headers of one
	stepResponseHeaders
	stepChunk
	stepLastChunk
	stepResponseTrailers
	stepNothing // a message without a request
	stepRaw     // a message as its bytes
	stepObserved
	stepHalfClose
	stepHangUp
	stepAbort
	stepCount
)

// What the server makes of a message; any other byte is the usual reply.
const (
	makeNoReply byte = 255 - iota
	makeTwoReplies
	makeImmediate
	makeModeOverride
	makeRaw // a reply as its bytes
	makeReturn
	makeError
	makeNilReply
	makeEnd // an end of the body, in a streamed response
)

// played is what a script came to.
type played struct {
	Received []*request // by the server
	Errors   []string   // of its Recv and Send
	Wire     []*response
	Process  string
	Panic    any
	won      bool // an abort has
	events   []extproc.Event
}

// play plays s with a server that wrap has wrapped, or not. Aborts that are left out are
// of no effect.
func play(t *testing.T, s script, wrap func(serverFunc, ...extproc.Option) extprocpb.ExternalProcessorServer, aborts bool, opts ...extproc.Option) (p played) {
	synctest.Test(t, func(t *testing.T) {
		m := []mode{none, streamed, buffered, duplex}[s.byte()%4]
		replies := script(s.text())
		var h *abort.Handle
		serve := serverFunc(func(st process) error {
			h = handle(st)
			send := func(r *response) {
				if err := st.Send(r); err != nil {
					p.Errors = append(p.Errors, "Send: "+err.Error())
				}
			}
			for {
				r, err := st.Recv()
				if err != nil {
					p.Errors = append(p.Errors, "Recv: "+err.Error())
					return err
				}
				p.Received = append(p.Received, r)
				switch replies.byte() {
				case makeNoReply:
				case makeTwoReplies:
					send(replyIn(m, r))
					send(replyIn(m, r))
				case makeImmediate:
					send(immediate("own"))
				case makeModeOverride:
					o := replyIn(m, r)
					o.ModeOverride = processingMode([]mode{none, streamed, buffered, duplex}[replies.byte()%4])
					send(o)
				case makeRaw:
					o := new(response)
					if proto.Unmarshal(replies.text(), o) == nil {
						send(o)
					}
				case makeReturn:
					return nil
				case makeError:
					return errors.New("own")
				case makeNilReply:
					send(nil)
				case makeEnd:
					send(&response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: streamedBody("end", true)}})
				default:
					send(replyIn(m, r))
				}
			}
		})
		st := extproctest.NewStream(context.Background(), 1000)
		opts := append([]extproc.Option{extproc.WithObserver(func(e extproc.Event) { p.events = append(p.events, e) })}, opts...)
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { p.Panic = recover() }()
			err := st.Serve(wrap(serve, opts...))
			p.Process = fmt.Sprint(err)
		}()
		for i := 0; len(s) > 0 && i < 200 && !p.won; i++ {
			var r *request
			switch s.byte() % stepCount {
			case stepRequestHeaders:
				r = requestHeaders(m, "x-request-id", string(s.text()), "content-type", []string{"application/json", "application/grpc"}[s.byte()%2])
			case stepRequestBody:
				r = &request{Request: &extprocpb.ProcessingRequest_RequestBody{RequestBody: &extprocpb.HttpBody{Body: s.text()}}}
			case stepRequestTrailers:
				r = &request{Request: &extprocpb.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocpb.HttpTrailers{}}}
			case stepEventStream:
				r = responseHeaders()
			case stepResponseHeaders:
				r = responseHeaders(":status", "200", "content-type", string(s.text()))
				r.GetResponseHeaders().EndOfStream = s.byte()%4 == 3
			case stepChunk:
				r = responseBody(string(s.text()), false)
			case stepLastChunk:
				r = responseBody(string(s.text()), true)
			case stepResponseTrailers:
				r = responseTrailers()
			case stepNothing:
				r = new(request)
			case stepRaw:
				r = new(request)
				if proto.Unmarshal(s.text(), r) != nil {
					continue
				}
			case stepObserved:
				r = responseBody("data: x\n\n", false)
				r.ObservabilityMode = true
			case stepHalfClose:
				st.HalfClose()
			case stepHangUp:
				st.HangUp()
			case stepAbort:
				if synctest.Wait(); aborts && h.Abort(abort.Preempted) {
					p.won = true
				}
			}
			if r != nil {
				st.Push(r)
			}
			synctest.Wait()
		}
		time.Sleep(10 * time.Millisecond) // for an answer
		st.HangUp()
		<-done
		synctest.Wait()
		time.Sleep(2 * time.Second)
		for len(st.Replies()) > 0 {
			p.Wire = append(p.Wire, <-st.Replies())
		}
	})
	return p
}

// ownLoop receives with RecvOrAbort.
type ownLoop struct{ *extproc.Stream }

func (s ownLoop) Recv() (*request, error) { return s.RecvOrAbort() }

func same[M proto.Message](a, b []M) bool {
	return slices.EqualFunc(a, b, func(x, y M) bool { return proto.Equal(x, y) })
}

// FuzzWrap holds what Wrap makes of a sequence of messages against the bare server:
// without an abort that wins there is no difference, for the server or on the wire; with
// one, what was sent before is the same, and one answer ends it.
func FuzzWrap(f *testing.F) {
	lines := func(replies string, steps ...string) []byte {
		return []byte(string(rune(1)) + string([]byte{byte(len(replies))}) + replies + strings.Join(steps, ""))
	}
	step := func(k byte, text ...string) string {
		b := string([]byte{k})
		for _, s := range text {
			b += string([]byte{byte(len(s))}) + s
		}
		return b
	}
	open := step(stepRequestHeaders, "6f1c7a52-9a9e-4f0e") + "\x00"
	events := []string{open, step(stepEventStream), step(stepChunk, "data: {\"id\":\"cmpl-1\"}\n\n"), step(stepChunk, "data: {"), step(stepChunk, "}\n\n")}
	ends := []string{step(stepLastChunk, "data: [DONE]\n\n")}
	for m := range byte(4) {
		for _, seed := range [][]byte{
			lines("", slices.Concat(events, ends)...),                                          // a chat completion
			lines("", slices.Concat(events[:3], []string{step(stepAbort)}, ends)...),           // ended in the middle
			lines("\x00\x00\x00\xff", slices.Concat(events[:4], []string{step(stepAbort)})...), // with a reply owed
			lines("", open, step(stepRequestBody, `{"model":"m"}`), step(stepAbort)),
			lines("", open, step(stepResponseHeaders, "application/json")+"\x00", step(stepLastChunk, "{}"), step(stepAbort)),
			lines("", append(events, step(stepHangUp))...),
			lines("", append(events, step(stepHalfClose), step(stepAbort))...),
			lines("\x00\xfd", slices.Concat(events, ends)...),     // the server answers by itself
			lines("\xfc\x03", slices.Concat(events, ends)...),     // overrides the mode
			lines("\x00\x00\xfa", slices.Concat(events, ends)...), // returns
			lines("\x00\xf9", slices.Concat(events, ends)...),     // fails
			lines("", open, step(stepObserved), step(stepAbort)),
			lines("", step(stepNothing), step(stepRaw, "\x12\x00"), step(stepResponseTrailers)),
		} {
			seed[0] = m
			f.Add(seed)
		}
	}
	bare := func(s serverFunc, _ ...extproc.Option) extprocpb.ExternalProcessorServer {
		return serverFunc(func(ps process) error {
			own, ctx := abort.New(ps.Context()) // for handle
			defer own.Close()
			return s(contextStream{ps, ctx})
		})
	}
	wrap := func(s serverFunc, opts ...extproc.Option) extprocpb.ExternalProcessorServer {
		return extproc.Wrap(s, opts...)
	}
	loop := func(s serverFunc, opts ...extproc.Option) extprocpb.ExternalProcessorServer {
		return extproc.Handler(func(st *extproc.Stream) error { return s(ownLoop{st}) }, opts...)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		wrap := wrap
		if len(b) > 4096 {
			return
		}
		differ := func(what string, a, b played) {
			t.Helper()
			if !same(a.Received, b.Received) || !same(a.Wire, b.Wire) || !slices.Equal(a.Errors, b.Errors) || a.Process != b.Process || fmt.Sprint(a.Panic) != fmt.Sprint(b.Panic) {
				t.Errorf("%s: bare (-), wrapped (+):\n%s", what, cmp.Diff(a, b, protocmp.Transform(), cmp.FilterPath(func(p cmp.Path) bool {
					n := p.Last().String()
					return n == ".won" || n == ".events"
				}, cmp.Ignore())))
			}
		}
		without := play(t, b, bare, false)
		differ("no abort", without, play(t, b, wrap, false))
		differ("no abort, RecvOrAbort", without, play(t, b, loop, false))

		var reg abort.Registry
		if len(b)%2 == 0 {
			wrap = loop
		}
		got := play(t, b, wrap, true, extproc.WithRegistry(&reg))
		if len(got.events) != 1 || (got.events[0].Outcome == abort.Aborted) != got.won {
			t.Errorf("an abort won: %v, events %+v", got.won, got.events)
		}
		if n := reg.Len(); n != 0 {
			t.Errorf("%d entries left", n)
		}
		if !got.won {
			differ("an abort that lost", without, got)
			return
		}
		answered := -1
		for i, r := range got.Wire {
			if r.GetImmediateResponse().GetDetails() == "evicted_preempted" {
				answered = i
				break
			}
		}
		if answered < 0 || answered != len(got.Wire)-1 {
			t.Fatalf("aborted, the answer is %d of %d messages", answered, len(got.Wire))
		}
		before := got.Wire[:answered]
		if n := len(before); n > 0 && isEvent(before[n-1]) && !(n <= len(without.Wire) && isEvent(without.Wire[n-1])) {
			before = before[:n-1]
		}
		if n := len(before); n > len(without.Wire) || !same(before, without.Wire[:n]) {
			t.Errorf("what went out before the answer is not what goes out without (-), but (+):\n%s", cmp.Diff(without.Wire, before, protocmp.Transform()))
		}
		if got.Process != "<nil>" || got.Panic != nil {
			t.Errorf("aborted, Process returned %s, panicked %v", got.Process, got.Panic)
		}
	})
}

// parseEvents splits an event stream as the clients' parsers do: the data of its events, and
// whether it ends within one.
func parseEvents(text string) (events []string, within bool) {
	text = strings.ReplaceAll(text, "\r\n", "\n")
	text = strings.ReplaceAll(text, "\r", "\n")
	lines := strings.Split(text, "\n")
	var data []string
	for i, l := range lines {
		if i == len(lines)-1 { // not ended
			return events, l != "" || data != nil
		}
		if l == "" {
			if data != nil {
				events = append(events, strings.Join(data, "\n"))
			}
			data = nil
			continue
		}
		if v, ok := strings.CutPrefix(l, "data:"); ok {
			data = append(data, strings.TrimPrefix(v, " "))
		}
	}
	return events, false
}

// FuzzEventBoundary cuts a response into chunks and has the server forward, replace and
// withhold them: if an error event is sent, every parser of event streams sees it as an
// event of its own and those before it as they were; and it is sent where it can be.
func FuzzEventBoundary(f *testing.F) {
	const chat = "data: {\"choices\":[{\"delta\":{\"content\":\"é\"}}]}\n\n"
	for _, s := range []string{chat + chat, ": keep-alive\n\n" + chat, "event: ping\r\ndata: x\r\n\r\n" + chat, "data: a\r\rdata: b\r\r", "\n\n\n", "id: 1\n\r\n\n"} {
		for _, cuts := range []string{"\x08\x08\x08\x08", "\x1f\x1f\x1f", "\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01", "\x10\x30\x50\x70\x10", "\x00\x02\x00"} {
			f.Add(s, []byte(cuts), byte(1), false)
			f.Add(s, []byte(cuts), byte(3), true)
		}
	}
	// More chunks wait for a reply than are remembered, and not all end an event.
	f.Add(strings.Repeat("data: a\n\n", 8)+strings.Repeat("data: b", 12), []byte(strings.Repeat("\x09", 8)+strings.Repeat("\x07", 12)), byte(10), false)
	f.Fuzz(func(t *testing.T, text string, cuts []byte, owed byte, fullDuplex bool) {
		m := streamed
		if fullDuplex {
			m = duplex
		}
		msgs := []*request{requestHeaders(m), responseHeaders()}
		var kinds []byte
		for _, c := range cuts[:min(len(cuts), 60)] {
			n := min(int(c&0x1f), len(text))
			msgs = append(msgs, responseBody(text[:n], false))
			kinds, text = append(kinds, c>>5), text[n:]
		}
		chunks := len(kinds)
		replied := max(0, chunks-int(owed%16))
		forwarded := ""
		serve := serverFunc(func(s process) error {
			var late []*request
			for {
				r, err := s.Recv()
				if err != nil {
					return nil
				}
				if r.GetResponseBody() == nil {
					s.Send(reply(r))
					continue
				}
				if late = append(late, r); len(late) <= chunks-replied {
					continue
				}
				r, late = late[0], late[1:]
				k, body := kinds[0], string(r.GetResponseBody().Body)
				kinds = kinds[1:]
				mutation := ""
				switch k {
				case 1:
					mutation, body = "clear", ""
				case 2:
					mutation, body = "data: A\n\n", "data: A\n\n"
				case 3:
					mutation, body = "data: A", "data: A"
				}
				forwarded += body
				if fullDuplex {
					s.Send(&response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: streamedBody(body, false)}})
				} else {
					s.Send(streamedReply(mutation))
				}
			}
		})
		wire, e := abortAfterWith(t, serve, abort.Preempted, msgs)
		last(t, wire)
		can := chunks > 0 && (fullDuplex || replied < chunks)
		clear := forwarded == "" || strings.HasSuffix(forwarded, "\n\n") || strings.HasSuffix(forwarded, "\r\r") || strings.HasSuffix(forwarded, "\r\n\r\n")
		want := can && clear
		if !fullDuplex && owed%16 >= 8 { // more than is remembered: in doubt there is none
			want = want && e.Answer == extproc.AnswerEvent
		}
		if (e.Answer == extproc.AnswerEvent) != want || isEvent(wire[0]) != want {
			t.Errorf("behind %q the answer is %v, %d of %d chunks replied to", forwarded, e.Answer, replied, chunks)
		}
		if e.Answer != extproc.AnswerEvent {
			return
		}
		events, within := parseEvents(forwarded)
		got, _ := parseEvents(forwarded + errorEvent)
		events = append(events, strings.TrimSuffix(strings.TrimPrefix(errorEvent, "data: "), "\n\n"))
		if d := cmp.Diff(events, got); d != "" || within {
			t.Errorf("an event behind %q, within one: %v (-want +got):\n%s", forwarded, within, d)
		}
	})
}

var (
	validName  = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")
	validValue = regexp.MustCompile("^[\t\x20-\x7e\\x{80}-\\x{10ffff}]*$")
)

// FuzzHeaders lets a client and a WithResponse that trusts it choose ids, names and
// values: the request is found by its id, and no answer has a header that is not one.
func FuzzHeaders(f *testing.F) {
	for _, id := range []string{"", "6f1c7a52-9a9e-4f0e-8d3c-0c1f6a4e2b11", "a\r\nset-cookie: x", "\x00", "\xff\xfe", "é", strings.Repeat("x", 257), strings.Repeat("y", 64<<10)} {
		f.Add(id, "x-request-id", id, "Out Of KV")
		f.Add(id, id, "1", id)
		f.Add(id, "x-envoy-a", id, "preempted")
	}
	f.Add("a", "Host", "b", "")
	f.Add("a", ":status", "200", "")
	f.Add("a", "Content-Length", "0", "")
	f.Fuzz(func(t *testing.T, id, name, value, reason string) {
		var reg abort.Registry
		tracked := ""
		msgs := []*request{requestHeaders(streamed, "x-request-id", id, "content-type", value)}
		found := false
		trusting := func(e *abort.Error, rs []abort.Request) *extprocpb.ImmediateResponse {
			return &extprocpb.ImmediateResponse{Status: &typepb.HttpStatus{Code: 503}, Details: "own", Headers: &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{
				{Header: &corepb.HeaderValue{Key: name, RawValue: []byte(value)}}}}}
		}
		serve := serverFunc(func(s process) error {
			r, err := s.Recv()
			if err != nil {
				return err
			}
			hs := reg.Lookup(id)
			found = len(hs) == 1 && hs[0] == handle(s)
			for label, h := range reg.All() {
				if len(label) > 256 || h != handle(s) {
					t.Errorf("listed as %q", label)
				}
				if again := reg.Lookup(label); label != "" && (len(again) != 1 || again[0] != h) {
					t.Errorf("%q is listed as %q, which finds %d", id, label, len(again))
				}
			}
			if err := s.Send(reply(r)); err != nil {
				return err
			}
			_, err = s.Recv()
			return err
		})
		wire, _ := abortAfterWith(t, serve, abort.Reason(reason), msgs, extproc.WithRegistry(&reg), extproc.WithResponse(trusting),
			extproc.WithTracker(trackerFunc(func(_ context.Context, rs ...abort.Request) { tracked = rs[0].ID }),
				func(_ context.Context, r *request) (abort.Request, bool) { return abort.Request{ID: id}, true }))
		if found != (id != "") || tracked != id {
			t.Errorf("%q: found %v, tracked as %q", id, found, tracked)
		}
		im := last(t, wire)
		if c := im.GetStatus().GetCode(); c < 400 || c > 599 {
			t.Errorf("status %d", c)
		}
		for _, o := range im.GetHeaders().GetSetHeaders() {
			k, v := o.GetHeader().GetKey(), o.GetHeader().GetRawValue()
			if !validName.MatchString(k) || strings.HasPrefix(k, ":") || bytes.ContainsAny(v, "\r\n\x00") || utf8.Valid(v) && !validValue.Match(v) {
				t.Errorf("header %q: %q", k, v)
			}
		}
		if im.Details != "own" && !json.Valid(im.Body) {
			t.Errorf("body %q", im.Body)
		}
		if label := strings.TrimPrefix(im.Details, "evicted_"); im.Details != "own" && (label != abort.Reason(reason).String() || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "") {
			t.Errorf("details %q", im.Details)
		}
	})
}

type trackerFunc func(context.Context, ...abort.Request)

func (f trackerFunc) TrackRequests(ctx context.Context, rs ...abort.Request) { f(ctx, rs...) }
