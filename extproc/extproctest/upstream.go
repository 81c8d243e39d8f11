package extproctest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// start takes the request in.
func (x *exchange) start() {
	h := x.requestHead()
	x.entry = Entry{RequestID: h.get("x-request-id"), Method: h.get(":method"), Path: h.get(":path"), Details: "via_upstream"}
	ctx, cancel := context.WithCancel(context.Background())
	x.stopUpload = cancel
	body := x.req.Body
	if body == nil || body == http.NoBody {
		x.request.begin(h, true)
		return
	}
	context.AfterFunc(ctx, func() { body.Close() }) // ends a Read, too
	x.request.begin(h, false)
	if n := x.req.ContentLength; x.req.GetBody != nil && 0 < n && n <= 16<<10 && len(x.req.Trailer) == 0 {
		// The client has a small body in memory. That reaches Envoy in one packet with the headers, and here too, since it
		// matters to the filter whether all of the body is there before the reply to the headers.
		data := make([]byte, n)
		if _, err := io.ReadFull(body, data); err != nil {
			x.leave(err)
			return
		}
		x.request.take(chunk{data: data})
		x.request.take(chunk{end: true})
		return
	}
	go pump(ctx, body, &x.req.Trailer, x.request.src)
}

// requestHead returns the request's headers as Envoy completes them.
func (x *exchange) requestHead() fields {
	r := x.req
	h := fieldsOf(r.Header)
	h.set(":method", r.Method)
	h.set(":scheme", r.URL.Scheme)
	h.set(":authority", r.Host)
	h.set(":path", r.URL.RequestURI())
	if r.Method == "" {
		h.set(":method", http.MethodGet)
	}
	if r.Host == "" {
		h.set(":authority", r.URL.Host)
	}
	if r.ContentLength > 0 {
		h.set("content-length", strconv.FormatInt(r.ContentLength, 10))
	}
	if h.get("x-request-id") == "" {
		var b [16]byte
		rand.Read(b[:])
		h.set("x-request-id", fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
	}
	if h.get("x-forwarded-proto") == "" {
		h.set("x-forwarded-proto", r.URL.Scheme)
	}
	return h
}

// startUpstream sends the request's headers to the upstream.
func (x *exchange) startUpstream() {
	ctx, cancel := context.WithCancel(x.out.Context())
	x.cancelUpstream = cancel
	h, out := x.request.head, x.out.WithContext(ctx)
	out.Method, out.Host, out.Header = h.get(":method"), h.get(":authority"), h.header()
	delete(out.Header, "Content-Length")
	if u, err := url.ParseRequestURI(h.get(":path")); err != nil {
		x.errorf("bad :path: %v", err)
	} else {
		out.URL.Path, out.URL.RawPath, out.URL.RawQuery = u.Path, u.RawPath, u.RawQuery
	}
	if x.request.noBody {
		out.Body, out.ContentLength = nil, 0
	} else {
		out.Body, out.ContentLength = x.request.out.body, h.length()
		x.request.out.trailer = &out.Trailer
	}
	upstream := x.envoy.Upstream
	if upstream == nil {
		upstream = http.DefaultTransport
	}
	go func() { // ends with the upstream's response, or soon after ctx
		res, err := upstream.RoundTrip(out)
		h := head{res: res, err: err}
		if err == nil {
			defer res.Body.Close()
			h.trailer = names(res.Trailer)
		}
		select {
		case x.upstream <- h:
		case <-ctx.Done():
			return
		}
		if err == nil {
			pump(ctx, res.Body, &res.Trailer, x.response.src)
		}
	}()
}

// responseHead takes what the upstream has answered.
func (x *exchange) responseHead(h head) {
	switch {
	case x.dropped && (h.err != nil || !x.keeps()): // it crossed the cancellation
		return
	case h.err != nil:
		// Envoy shows its own replies to the server as if they were the upstream's, since 1.37.
		reason := "connection_termination"
		if op, ok := errors.AsType[*net.OpError](h.err); ok && op.Op == "dial" {
			reason = "remote_connection_failure"
		}
		x.ownReply(http.StatusServiceUnavailable, "upstream_reset_before_response_started{"+reason+"}",
			"upstream connect error or disconnect/reset before headers. reset reason: "+strings.ReplaceAll(reason, "_", " "))
		return
	}
	f := fieldsOf(h.res.Header)
	f.set(":status", strconv.Itoa(h.res.StatusCode))
	if h.res.ContentLength > 0 && f.length() < 0 {
		f.set("content-length", strconv.FormatInt(h.res.ContentLength, 10))
	}
	if !x.dropped {
		x.entry.Code, x.announced = h.res.StatusCode, h.trailer
	}
	x.response.begin(f, h.res.Body == http.NoBody || h.res.ContentLength == 0 || !bodyAllowed(x.req.Method, h.res.StatusCode))
}

// ownReply answers the client through the filter. The request goes no further.
func (x *exchange) ownReply(code int, details, body string) {
	x.entry.Code, x.entry.Details = code, details
	x.stopUpload()
	x.request.quit()
	h := localHead(code, len(body))
	x.response.begin(h, false)
	x.response.take(chunk{data: []byte(body), end: true})
}

// localReply answers the client past the filter, if the response's headers have not been released; it resets the response
// if they have.
func (x *exchange) localReply(code int, m *extprocpb.HeaderMutation, body []byte, details string) {
	x.drop(details)
	if x.response.released {
		x.response.out.end(ErrReset, nil)
		return
	}
	h := localHead(code, len(body))
	h.mutate(m, fixedInLocalReply, x.errorf)
	x.response.head, x.response.noBody, x.announced = h, len(body) == 0, nil
	x.response.release()
	if x.req.Method != http.MethodHead {
		x.response.out.write(bytes.Clone(body))
	}
	x.response.out.end(io.EOF, nil)
}

func localHead(code, length int) fields {
	h := fields{":status": {strconv.Itoa(code)}, "content-length": {strconv.Itoa(length)}}
	if length > 0 {
		h.set("content-type", "text/plain")
	}
	return h
}

// tooLarge ends what BUFFERED cannot buffer.
func (x *exchange) tooLarge(s *side) {
	switch {
	case s.response:
		x.localReply(http.StatusInternalServerError, nil, []byte("Internal Server Error"), "response_payload_too_large")
		x.hangUp(Reset, 0)
	case x.response.head != nil: // an early one
		x.reset("request_payload_too_large", ErrReset)
	default:
		x.ownReply(http.StatusRequestEntityTooLarge, "request_payload_too_large", "Payload Too Large")
	}
}

// deliver sends the response's headers to the client.
func (x *exchange) deliver() {
	h := x.response.head
	code, _ := strconv.Atoi(h.get(":status"))
	res := &http.Response{
		Status:     fmt.Sprintf("%03d %s", code, http.StatusText(code)),
		StatusCode: code,
		Proto:      "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header:        h.header(),
		Body:          x.response.out.body,
		ContentLength: h.length(),
		Trailer:       x.announced,
		Request:       x.req,
	}
	if res.ContentLength < 0 && x.response.noBody && x.req.Method != http.MethodHead {
		res.ContentLength = 0
	}
	x.response.out.trailer = &res.Trailer
	x.entry.Code = code
	x.answerClient(head{res: res})
}

func (x *exchange) answerClient(h head) {
	x.headSent = true
	x.head <- h
}

// responseDone is called when the end of the response has gone on: nothing else of the request matters then.
func (x *exchange) responseDone() {
	x.cancelUpstream()
	x.stopUpload()
	x.response.ended = true
	x.request.quit()
}

// names returns the names in h without their values.
func names(h http.Header) http.Header {
	if len(h) == 0 {
		return nil
	}
	n := make(http.Header, len(h))
	for k := range h {
		n[k] = nil
	}
	return n
}
